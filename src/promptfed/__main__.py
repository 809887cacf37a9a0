"""python -m promptfed"""

from .cli import main

if __name__ == "__main__":
    main()
