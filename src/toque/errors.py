"""Every error that Toque raises on purpose, and the one table that maps it to a status.

::

    ToqueError
    ├── RequestError            the caller's fault: 400
    │   ├── ContextLengthError      prompt (+ answer) cannot fit: 400 context_length_exceeded
    │   ├── GrammarError            no grammar, or one too complex to follow: 400 invalid_grammar
    │   ├── TemplateError           the chat template refused or misbehaved: 400
    │   ├── AuthenticationError     no key, or a wrong one: 401
    │   ├── PermissionDeniedError   the key may not do this: 403
    │   ├── NotFoundError           no such model, route or object: 404
    │   ├── MethodNotAllowedError   405
    │   ├── PayloadTooLargeError    413
    │   └── IdempotencyKeyError     the key was used for another request: 422
    ├── OverloadedError         try again later, with Retry-After
    │   ├── QueueFullError          this deployment's queue is full: 429
    │   ├── BudgetError             the key or tenant has spent its month's budget: 429
    │   ├── RateLimitError          this key has used its allowance: 429
    │   ├── RequestInProgressError  the same request is being answered: 409
    │   └── UnavailableError        loading, draining, or no replica alive: 503
    │       └── VersionGoneError        this version of the model is not served any more
    ├── DeadlineError           the request's deadline passed: 504
    ├── CancelledError          the client left; nobody reads the answer: 499
    ├── ModelError              a model file or folder cannot be used: 422 over the admin API
    │   ├── FormatError             damaged or hostile file; names the field
    │   ├── UnsupportedModelError   well-formed, but not something Toque runs; names what is supported
    │   └── SignatureError          nobody who is trusted has signed it
    ├── ConfigError             a setting is unknown or out of range; names both
    ├── StoreError              the local model store cannot be written or is damaged: 500
    ├── DownloadError           a source did not deliver what was asked for: 502
    └── EngineError             our fault: 500
        ├── ReplicaDiedError        the replica went away in the middle: 500
        └── WireError               a peer broke the session protocol; its session is closed
"""

from __future__ import annotations

from typing import ClassVar


class ToqueError(Exception):
    """Base of the tree. ``message`` is for people: it names the bound, the value given, and what to do."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.error_code = code if code is not None else type(self).code


class RequestError(ToqueError):
    status = 400
    type = "invalid_request_error"


class ContextLengthError(RequestError):
    code = "context_length_exceeded"


class GrammarError(RequestError):
    code = "invalid_grammar"


class TemplateError(RequestError):
    code = "chat_template_error"


class AuthenticationError(RequestError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class PermissionDeniedError(RequestError):
    status = 403
    type = "permission_error"


class NotFoundError(RequestError):
    status = 404
    code = "not_found"


class ModelNotFoundError(NotFoundError):
    code = "model_not_found"


class MethodNotAllowedError(RequestError):
    status = 405
    code = "method_not_allowed"


class PayloadTooLargeError(RequestError):
    status = 413
    code = "payload_too_large"


class IdempotencyKeyError(RequestError):
    status = 422
    type = "idempotency_error"
    code = "idempotency_key_reused"


class OverloadedError(ToqueError):
    """Nothing was started; the same request may be sent again after ``retry_after_s`` seconds."""

    status = 503
    type = "overloaded_error"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class QueueFullError(OverloadedError):
    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class RateLimitError(OverloadedError):
    """The key has used what it may use for now."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class RequestInProgressError(OverloadedError):
    status = 409
    type = "idempotency_error"
    code = "idempotency_in_progress"


class ConflictError(RequestError):
    """What is asked for does not go with what is going on; the message says what does."""

    status = 409
    code = "conflict"


class BudgetError(OverloadedError):
    status = 429
    type = "insufficient_quota"
    code = "budget_exceeded"


class UnavailableError(OverloadedError):
    code = "service_unavailable"


class VersionGoneError(UnavailableError):
    """The request has been prepared for a version that is gone; prepared for another, it can be answered."""


class DeadlineError(ToqueError):
    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class CancelledError(ToqueError):
    status = 499
    type = "cancelled"
    code = "client_closed_request"


class ModelError(ToqueError):
    status = 422
    type = "model_error"


class FormatError(ModelError):
    """A damaged or hostile model file. ``field`` is the part of the file that is wrong."""

    code = "bad_model_file"

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(f"{field}: {message}", param=field)
        self.field = field


class UnsupportedModelError(ModelError):
    code = "unsupported_model"


class SignatureError(ModelError):
    code = "unsigned_model"


class ConfigError(ToqueError):
    status = 400
    type = "config_error"
    code = "bad_config"


class StoreError(ToqueError):
    """The local model store: disk full, no permission, a file that is gone. Nothing half-written is visible."""

    code = "store_error"


class DownloadError(ToqueError):
    """A source is out of reach, does not have it, or sent something else. What was downloaded so far is kept."""

    status = 502
    code = "download_failed"


class EngineError(ToqueError):
    code = "engine_error"


class ReplicaDiedError(EngineError):
    code = "replica_died"


class WireError(EngineError):
    code = "wire_error"
