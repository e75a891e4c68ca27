"""How the plugin refuses."""


class AdaptiveError(SystemExit):
    """The server must not start, or must stop: the message is one sentence that says what to do.

    A ``SystemExit`` on purpose. The host's plugin loader logs an ``Exception`` of a plugin and goes on without it,
    which would silently serve stock; and a ``SystemExit`` ends a process with its one line and exit status 1 instead of
    a traceback.
    """

    def __init__(self, message: str) -> None:
        super().__init__(f"sglang_adaptive: {message}")
