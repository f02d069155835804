"""Verifies the ID token of an identity provider: signature, issuer, audience, times and nonce.

Only this module needs the extra windlass[oidc].
"""

from collections.abc import Mapping
from typing import Any

from joserfc import errors, jwt
from joserfc.jwk import KeySet

from windlass.server.oidc import BadIdToken, ExpectedIdToken

# Clocks of issuer and server may differ by this.
LEEWAY_S = 60
# No symmetric algorithm: the client secret is not a signing key. And never "none".
ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]


def verify_id_token(token: str, keys: Mapping[str, Any], expected: ExpectedIdToken) -> Mapping[str, Any]:
    try:
        key_set = KeySet.import_key_set({"keys": list(keys["keys"])})
        claims = jwt.decode(token, key_set, algorithms=ALGORITHMS).claims
        jwt.JWTClaimsRegistry(
            leeway=LEEWAY_S,
            iss={"essential": True, "value": expected.issuer},
            sub={"essential": True},
            aud={"essential": True, "value": expected.client_id},
            exp={"essential": True},
            iat={"essential": True},
            nonce={"essential": True, "value": expected.nonce},
        ).validate(claims)
    except (errors.InvalidKeyIdError, errors.BadSignatureError) as error:
        raise BadIdToken(type(error).__name__, may_have_new_key=True) from None
    except (errors.JoseError, KeyError, TypeError, ValueError) as error:
        raise BadIdToken(type(error).__name__) from None
    audience = claims.get("aud")
    is_shared = isinstance(audience, list) and len(audience) > 1
    if (is_shared or "azp" in claims) and claims.get("azp") != expected.client_id:
        raise BadIdToken("issued to another client")
    return dict(claims)
