"""Write the manifest for `kubectl apply`: a Job with one pod per machine, and a Service through which they meet."""

import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lockstep.config.placement import DEFAULT_PORT
from lockstep.errors import EXIT_DRIFT, EXIT_STOPPED, EXIT_USER, UserError
from lockstep.submit.job_request import JobRequest

_FAILURES_PER_POD = 3  # that a retry may fix; before that, agents restart their ranks
_MAX_LABEL_CHARS = 63  # of a DNS name
_SHARED_MEMORY = "/dev/shm"
_INDEX = "JOB_COMPLETION_INDEX"  # set by Kubernetes in each pod of an indexed Job

_HEAD = f"""\
# Written by `lockstep submit kubernetes`, for `kubectl apply -f`. One pod per machine, whose process is the agent.
# Pods of a node that is drained or preempted save and end with exit code {EXIT_STOPPED}; others replace them.
# Exit codes {EXIT_USER} (a user error) and {EXIT_DRIFT} (a run that cannot resume unchanged) end the Job.
"""


class Volume(NamedTuple):
    """A persistent volume claim and where to mount it."""

    claim: str
    path: str


@dataclass(frozen=True)
class KubernetesOptions:
    """Options for Kubernetes only."""

    image: str
    volumes: tuple[Volume, ...] = ()
    folder: str | None = None  # working folder; None: the image's

    def check(self) -> None:
        """Raise a `UserError` for values that Kubernetes would not accept."""
        if not re.fullmatch(r"[\w][\w./:@-]*", self.image, re.ASCII):
            raise UserError(f"--image {self.image[:60]!r}: expected the name of an image, as in registry/name:tag")
        if self.folder is not None and not self.folder.startswith("/"):
            raise UserError(f"--workdir {self.folder[:60]!r}: expected an absolute path")
        paths = [volume.path for volume in self.volumes]
        for path in paths:
            if path == _SHARED_MEMORY or paths.count(path) > 1:
                raise UserError(
                    f"--volume …:{path}: that folder is already mounted ({_SHARED_MEMORY} always is): choose another"
                )


def read_volume(text: str) -> Volume:
    """Read the option --volume."""
    claim, _, path = text.partition(":")
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", claim) or not re.fullmatch(r"/[^:\0]+", path):
        raise UserError(f"--volume {text[:60]!r}: expected a claim and a mount path, as in runs:/workspace/runs")
    return Volume(claim, path)


def check_kubernetes_name(name: str, num_pods: int) -> None:
    """Check a Job's name, which also names its Service and, with a number, the host of each pod."""
    most = _MAX_LABEL_CHARS - len(f"-{num_pods - 1}")
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) or len(name) > most:
        raise UserError(
            f"--name {name[:80]!r}: expected at most {most} lower-case letters, digits and dashes, first a letter"
        )


def kubernetes_name(text: str) -> str:
    """Turn a file name into a Job name."""
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (label if label[:1].isalpha() else f"job-{label}")[:40].rstrip("-")


def job_manifest(job: JobRequest, options: KubernetesOptions) -> str:
    """Return the manifest as YAML."""
    import yaml

    parts = [_job(job, options)] if job.machines.count == 1 else [_service(job), _job(job, options)]
    return _HEAD + str(yaml.safe_dump_all(parts, sort_keys=False, allow_unicode=True, width=120))


def _service(job: JobRequest) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        "spec": {
            "clusterIP": "None",  # headless: only gives the pods hostnames
            "selector": {"job-name": job.name},
            "publishNotReadyAddresses": True,  # pods must meet before they are ready
        },
    }


def _job(job: JobRequest, options: KubernetesOptions) -> dict[str, Any]:
    count = job.machines.count
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job.name},
        "spec": {
            "completions": count,
            "parallelism": count,
            "completionMode": "Indexed",
            "backoffLimit": _FAILURES_PER_POD * count,
            "podFailurePolicy": {
                "rules": [
                    _ended_with("Ignore", *job.codes_to_start_again),  # replaced, without limit
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    _ended_with("FailJob", EXIT_USER, EXIT_DRIFT),
                ]
            },
            "template": {"spec": _pod(job, options)},
        },
    }


def _ended_with(action: str, *codes: int) -> dict[str, Any]:
    return {"action": action, "onExitCodes": {"operator": "In", "values": list(codes)}}


def _pod(job: JobRequest, options: KubernetesOptions) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [{"name": "memory", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "memory", "mountPath": _SHARED_MEMORY}]  # ranks and data workers share tensors there
    for number, volume in enumerate(options.volumes):
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": volume.claim}})
        mounts.append({"name": f"volume-{number}", "mountPath": volume.path})
    amounts = _resources(job)
    container = {
        "name": "lockstep",
        "image": options.image,
        **_command(job),
        **({} if options.folder is None else {"workingDir": options.folder}),
        "resources": {"requests": amounts, "limits": dict(amounts)},
        "volumeMounts": mounts,
    }
    return {
        **({"subdomain": job.name} if job.machines.count > 1 else {}),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.stop_before_s,
        "containers": [container],
        "volumes": volumes,
    }


def _resources(job: JobRequest) -> dict[str, Any]:
    machines = job.machines
    amounts: dict[str, Any] = {"cpu": machines.cpus}
    if machines.memory is not None:
        amounts["memory"] = f"{machines.memory.amount}{machines.memory.unit}i"
    if machines.gpus is not None:
        amounts["nvidia.com/gpu"] = machines.gpus
    return amounts


def _command(job: JobRequest) -> dict[str, list[str]]:
    """Return the container's command. Its first process is the agent, because that is what Kubernetes asks to stop."""
    placement = []
    if job.machines.count > 1:
        placement = ["--nnodes", str(job.machines.count), "--node-rank", f"$({_INDEX})"]
        placement += ["--master-addr", f"{job.name}-0.{job.name}", "--master-port", str(DEFAULT_PORT)]
    escaped = job.command._replace(words=tuple(map(_literal, job.command.words)))
    words = replace(job, command=escaped).command_line(*placement)
    if job.setup is None:
        return {"command": words}
    return {"command": ["bash", "-c", _literal(f'set -e\n{job.setup}\nexec "$@"'), "bash", *words]}


def _literal(text: str) -> str:
    """Escape dollars: Kubernetes replaces $(NAME) in a command."""
    return text.replace("$", "$$")
