"""What tiga raises. A message says what was asked, what is wrong with names and numbers, and what to write instead."""


class TigaError(ValueError):
    """Something the caller can mend: a field, a size, an argument, a program."""


class TraceError(TigaError):
    """An edge function does something that cannot be traced; the message quotes the line."""
