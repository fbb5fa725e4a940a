"""The errors that cross package borders, and who is at fault in each.

    XpydError
    |-- UserError        the input is wrong; the message names the field and the fix; no retry
    |   `-- ApiError     the same, or a refusal, as an OpenAI HTTP answer
    `-- ProtocolError    a peer sent what the protocol forbids; close that connection, nothing else

Each package has its own subclasses; foreign errors are wrapped with `from`.
"""

from __future__ import annotations

import json


class XpydError(Exception):
    """Base of every error that xpyd raises on purpose."""


class UserError(XpydError):
    """The input is wrong. `str(error)` names the field and what is allowed; exit status 2."""


class ProtocolError(XpydError):
    """The remote side broke the protocol. The connection is closed; its peers are not touched."""


class ApiError(UserError):
    """An answer in OpenAI's error format.

    `param` is the request field at fault, `code` OpenAI's machine-readable code where it has one.
    `retry_after_s` becomes the Retry-After header. The message must hold no engine address.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        """OpenAI's error type for the status."""
        if self.status == 404:
            return "not_found_error"
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> bytes:
        """The JSON body: {"error": {"message", "type", "param", "code"}}."""
        return json.dumps(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "param": self.param,
                    "code": self.code,
                }
            }
        ).encode()
