"""Time limits of the tests. They end a test that hangs; none of them measures speed: the machine may be busy."""

HANG = 1800  # seconds
