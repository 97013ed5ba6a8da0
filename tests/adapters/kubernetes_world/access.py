"""Who a token is, and what RBAC's roles and bindings allow them; nothing else is allowed."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from tests.adapters.kubernetes_world.kinds import BY_PATH, RBAC, Failure, Obj
from tests.adapters.kubernetes_world.store import Store

ADMIN = "admin"


@dataclass(frozen=True)
class Asked:
    """One request, as it is authorised."""

    user: str
    verb: str
    group: str
    resource: str
    namespace: str = ""
    name: str = ""


class Access:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.tokens: dict[str, str] = {}
        self.asked: list[Asked] = []
        """All that was authorised and allowed, for tests that compare it with what the manifests grant."""

    def token(self, user: str) -> str:
        made = secrets.token_urlsafe(24)
        self.tokens[made] = user
        return made

    def revoke(self, token: str) -> None:
        self.tokens.pop(token, None)

    def who(self, header: str) -> str:
        user = self.tokens.get(header.removeprefix("Bearer "))
        if user is None:
            raise Failure(401, "Unauthorized", "Unauthorized")
        return user

    def require(self, asked: Asked) -> None:
        if asked.user != ADMIN and not self._allowed(asked):
            where = f' in the namespace "{asked.namespace}"' if asked.namespace else " at the cluster scope"
            thing = f"{asked.resource}{' ' + repr(asked.name) if asked.name else ''}"
            raise Failure(
                403,
                "Forbidden",
                f'{thing} is forbidden: User "{asked.user}" cannot {asked.verb} resource "{asked.resource}" in API group "{asked.group}"{where}',
            )
        self.asked.append(asked)

    def _allowed(self, asked: Asked) -> bool:
        for binding in self.store.list(BY_PATH[RBAC, "clusterrolebindings"]):
            if _bound(binding, asked.user) and self._grants(binding, "", asked):
                return True
        if not asked.namespace:
            return False
        bindings = self.store.list(BY_PATH[RBAC, "rolebindings"], asked.namespace)
        return any(_bound(binding, asked.user) and self._grants(binding, asked.namespace, asked) for binding in bindings)

    def _grants(self, binding: Obj, namespace: str, asked: Asked) -> bool:
        ref = binding["roleRef"]
        plural = "clusterroles" if ref["kind"] == "ClusterRole" else "roles"
        try:
            role = self.store.get(BY_PATH[RBAC, plural], namespace, ref["name"])
        except Failure:
            return False
        return any(
            asked.group in rule.get("apiGroups", []) and asked.resource in rule.get("resources", []) and asked.verb in rule.get("verbs", [])
            for rule in role.get("rules") or []
        )


def service_account(namespace: str, name: str) -> str:
    return f"system:serviceaccount:{namespace}:{name}"


def _bound(binding: Obj, user: str) -> bool:
    return any(
        one["kind"] == "ServiceAccount" and service_account(one.get("namespace", ""), one["name"]) == user
        for one in binding.get("subjects") or []
    )
