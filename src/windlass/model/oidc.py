"""Settings of the login through an identity provider (OpenID Connect), and the mapping of its claims to roles."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from windlass.model.auth import MAX_PERSON_CHARACTERS, Role
from windlass.model.comma_separated import TextList
from windlass.model.urls import is_private_host, problem_of_web_address

# Stands for every user that the provider authenticates.
ALL_USERS = "*"


class OidcConfig(BaseModel):
    """Login to the dashboard through an identity provider. Needs the extra windlass[oidc]."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    issuer: str | None = Field(default=None, description="URL of the identity provider. Default: no such login.")
    client_id: str | None = Field(default=None, description="Client that is registered there for this dashboard.")
    client_secret: SecretStr | None = Field(default=None, description="Its secret, if it has one.")
    role_claim: str = Field(default="groups", description="Claim of the ID token that decides the role.")
    name_claim: str = Field(default="email", description="Claim that names the person in the audit list.")
    admins: TextList = Field(default=(), description="Values of `role_claim` for the role admin.")
    operators: TextList = Field(default=(), description="Values of `role_claim` for the role operator.")
    viewers: TextList = Field(default=(), description="Values of `role_claim` for the role viewer; * for all users.")
    scopes: TextList = Field(default=("openid", "email", "profile"), description="Scopes to ask for.")

    @field_validator("issuer")
    @classmethod
    def _check_issuer(cls, issuer: str | None) -> str | None:
        if issuer is None:
            return None
        problem = problem_of_web_address(issuer)
        if problem is not None:
            raise ValueError(f"it {problem}")
        host = issuer.partition("://")[2].partition("/")[0].rpartition(":")[0] or issuer.partition("://")[2]
        if issuer.startswith("http://") and not is_private_host(host.strip("[]")):
            raise ValueError("it must begin with https://: anyone on the way could log in as anyone")
        return issuer

    @model_validator(mode="after")
    def _check_client(self) -> Self:
        if self.issuer is None:
            return self
        if self.client_id is None:
            raise ValueError("issuer is set and client_id is not: register a client at the provider")
        if not (self.admins or self.operators or self.viewers):
            raise ValueError("no user could log in: set admins, operators or viewers")
        if ALL_USERS in (*self.admins, *self.operators):
            raise ValueError("* is allowed for viewers only")
        return self


def role_of(config: OidcConfig, claims: Mapping[str, Any]) -> Role | None:
    """The highest role that the claims of a person allow; None if they allow none.

    An e-mail address that the provider did not verify could be anyone's, so it allows no more than any user has.
    """
    is_unverified = config.role_claim == "email" and claims.get("email_verified") is not True
    given = None if is_unverified else claims.get(config.role_claim)
    values = {str(each) for each in given} if isinstance(given, list) else {str(given)} if given is not None else set()
    for role, allowed in (
        (Role.ADMIN, config.admins),
        (Role.OPERATOR, config.operators),
        (Role.VIEWER, config.viewers),
    ):
        if values & set(allowed):
            return role
    return Role.VIEWER if ALL_USERS in config.viewers else None


def name_of(config: OidcConfig, claims: Mapping[str, Any]) -> str:
    """The person's name for the audit list: the configured claim, or the subject, which is always there.

    An e-mail address that the provider did not verify could be anyone's, so it is not used.
    """
    name = claims.get(config.name_claim)
    # Not all providers have this claim, and some write it as a text.
    is_verified = str(claims.get("email_verified", True)).lower() == "true"
    if not isinstance(name, str) or not name.strip() or (config.name_claim == "email" and not is_verified):
        name = str(claims["sub"])
    return "".join(c for c in name if c.isprintable())[:MAX_PERSON_CHARACTERS] or "unnamed"
