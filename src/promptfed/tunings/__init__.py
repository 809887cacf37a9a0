"""What is trained, one file per kind; the contract is promptfed.tuning."""
