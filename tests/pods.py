"""Start the command of a pod as Kubernetes would, on a machine without Kubernetes."""

import re
from typing import Any


def as_kubernetes_starts_it(container: dict[str, Any], index: int) -> list[str]:
    """Return a container's command in the pod with this index: known $(NAME)s are replaced, and $$ means $."""

    def expanded(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return str(index) if found[1] == "JOB_COMPLETION_INDEX" else found[0]

    return [re.sub(r"\$\$|\$\(([^)]*)\)", expanded, word) for word in container["command"]]
