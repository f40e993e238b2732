"""What a person is told when something cannot be done."""


class Refused(ValueError):
    """Nothing was started: one line that names the value and the rule it breaks."""
