"""Pages about access: tokens and sessions, and the list of who did what."""

from collections.abc import Sequence

from windlass.dashboard.rendering import PageContext, next_page_url, render
from windlass.model.auth import DEFAULT_TOKEN_TTL_S, ApiToken, Role, Session
from windlass.model.event import Event
from windlass.model.listing import Page

# Revoked and expired tokens shown below the active ones.
MAX_ENDED_SHOWN = 20


def access_page(
    page_context: PageContext, *, tokens: Sequence[ApiToken], sessions: Sequence[Session], new_token: str | None
) -> str:
    """`new_token`: a token that was just created. It is shown this once."""
    active = [token for token in tokens if token.status(page_context.now) == "active"]
    ended = [token for token in tokens if token.status(page_context.now) != "active"]
    return render(
        "access.html",
        page_context,
        here="access",
        tokens=[*active, *ended[:MAX_ENDED_SHOWN]],
        sessions=sessions,
        new_token=new_token,
        roles=[role.value for role in Role],
        default_days=int(DEFAULT_TOKEN_TTL_S / 86_400),
    )


def audit_page(page_context: PageContext, page: Page[Event], *, actor: str | None, is_first: bool) -> str:
    next_url = next_page_url("/audit", page, actor=actor)
    return render(
        "audit.html", page_context, here="audit", rows=page.rows, actor=actor, next_url=next_url, is_first=is_first
    )
