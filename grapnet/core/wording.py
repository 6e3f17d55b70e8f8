"""The wording of messages."""

_SPOKEN = "AEFHILMNORSX"  # letters whose names begin with a vowel


def with_article(kind: str) -> str:
    """Returns the name of a class with its article, as it is read out.

    Examples:
        >>> [
        ...     with_article(kind)
        ...     for kind in ("Adam", "SGD", "RReLU", "int", "Rprop", "GrapNet", "UserList")
        ... ]
        ['an Adam', 'an SGD', 'an RReLU', 'an int', 'a Rprop', 'a GrapNet', 'a UserList']
    """
    is_spelled_out = len(kind) > 1 and kind[:2].isupper()
    return f"{'an' if kind[:1] in (_SPOKEN if is_spelled_out else 'AEIOaeio') else 'a'} {kind}"
