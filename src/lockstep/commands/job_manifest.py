"""The manifest that `kubectl apply` takes: a Job with a pod for each machine, and the name under which they meet."""

import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lockstep.commands.job_request import JobRequest
from lockstep.config.placement import DEFAULT_PORT
from lockstep.errors import EXIT_DRIFT, EXIT_STOPPED, EXIT_USER, UserError

_FAILURES_PER_POD = 3  # those that another try may heal; agents have restarted their ranks before that
_MOST_LABEL = 63  # characters of a name in the DNS
_SHARED_MEMORY = "/dev/shm"
_INDEX = "JOB_COMPLETION_INDEX"  # set by Kubernetes in each pod of an indexed Job

_HEAD = f"""\
# Written by `lockstep submit kubernetes`; for `kubectl apply -f`. A pod for each machine, with an agent as its process.
# Pods that must go, for a node is drained or preempted, save and end with code {EXIT_STOPPED}; others take their place.
# Codes {EXIT_USER} and {EXIT_DRIFT}, a mistake and a run that cannot go on unchanged, end the Job.
"""


class Volume(NamedTuple):
    claim: str
    path: str


@dataclass(frozen=True)
class KubernetesOptions:
    """What only Kubernetes asks for."""

    image: str
    volumes: tuple[Volume, ...] = ()
    folder: str | None = None  # to work in; None: the image's own

    def check(self) -> None:
        if not re.fullmatch(r"[\w][\w./:@-]*", self.image, re.ASCII):
            raise UserError(f"--image {self.image[:60]!r}: expected an image's name, as in registry/name:tag")
        if self.folder is not None and not self.folder.startswith("/"):
            raise UserError(f"--workdir {self.folder[:60]!r}: expected a whole path, from / on")
        paths = [volume.path for volume in self.volumes]
        for path in paths:
            if path == _SHARED_MEMORY or paths.count(path) > 1:
                raise UserError(f"--volume …:{path}: that folder is given twice ({_SHARED_MEMORY} is always there)")


def read_volume(text: str) -> Volume:
    claim, _, path = text.partition(":")
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", claim) or not re.fullmatch(r"/[^:\0]+", path):
        raise UserError(f"--volume {text[:60]!r}: expected a claim and where it is to be, as in runs:/workspace/runs")
    return Volume(claim, path)


def check_label(name: str, num_pods: int) -> None:
    """The Job's name is its Service's, and with a number the host name of each pod."""
    most = _MOST_LABEL - len(f"-{num_pods - 1}")
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) or len(name) > most:
        raise UserError(
            f"--name {name[:80]!r}: expected a letter, then small letters, digits and dashes, {most} in all at most"
        )


def label_for(text: str) -> str:
    """A Job's name after a file's."""
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (label if label[:1].isalpha() else f"job-{label}")[:40].rstrip("-")


def job_manifest(job: JobRequest, options: KubernetesOptions) -> str:
    import yaml

    parts = [_job(job, options)] if job.machines.count == 1 else [_service(job), _job(job, options)]
    return _HEAD + str(yaml.safe_dump_all(parts, sort_keys=False, allow_unicode=True, width=120))


def _service(job: JobRequest) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        "spec": {
            "clusterIP": "None",  # it gives the pods names, and no address of its own
            "selector": {"job-name": job.name},
            "publishNotReadyAddresses": True,  # pods meet before anybody could find them ready
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
                    _ended_with("Ignore", EXIT_STOPPED),  # replaced, however often
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
    """The agent is the container's first process, which is the one that Kubernetes asks to stop."""
    meeting = []
    if job.machines.count > 1:
        meeting = ["--nnodes", str(job.machines.count), "--node-rank", f"$({_INDEX})"]
        meeting += ["--master-addr", f"{job.name}-0.{job.name}", "--master-port", str(DEFAULT_PORT)]
    words = replace(job, submitted=job.submitted._replace(words=tuple(map(_literal, job.submitted.words)))).words(
        *meeting
    )
    if job.setup is None:
        return {"command": words}
    return {"command": ["bash", "-c", _literal(f'set -e\n{job.setup}\nexec "$@"'), "bash", *words]}


def _literal(text: str) -> str:
    """Kubernetes replaces $(NAME) in a command; two dollars are one."""
    return text.replace("$", "$$")
