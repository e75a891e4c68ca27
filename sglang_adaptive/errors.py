"""How the plugin refuses."""


class AdaptiveError(BaseException):
    """The server must not start, or must stop: the message is one sentence that says what to do.

    Not an ``Exception`` on purpose: the host's plugin loader logs an ``Exception`` of a plugin and goes on without it,
    which would silently serve stock.
    """
