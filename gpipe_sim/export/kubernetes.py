"""Kubernetes: a PyTorchJob of Kubeflow's training operator, which runs a plan on our own engine, a pod for each node.

Every pod runs the script that `torchrun` exports; the operator tells it which one it is, and where the first one is. It
was written for the operator's version 1.9 (kubeflow.org/v1), and no cluster has run it yet; that the script runs on two
nodes is tested.
"""

import re

from gpipe_sim.export.processes import device_of, job_name, processes_per_node, what_is_rehearsed
from gpipe_sim.export.torchrun import script
from gpipe_sim.export.words import Written
from gpipe_sim.plan.plan import Plan

_POD = """
      replicas: {count}
      restartPolicy: Never
      template:
        spec:
          containers:
            - name: pytorch
              image: IMAGE
              workingDir: /workspace
              command: [bash, -c]
              args:
                - |
{script}
              volumeMounts:
                - {{name: workspace, mountPath: /workspace}}
                - {{name: shared-memory, mountPath: /dev/shm}}
              resources:
                limits: {{{limits}}}
          volumes:
            - name: workspace
              persistentVolumeClaim: {{claimName: CLAIM}}
            - name: shared-memory
              emptyDir: {{medium: Memory}}
"""


def write(plan: Plan, plan_path: str) -> Written:
    """IMAGE and CLAIM are for the reader to fill in: they are nothing that a plan knows."""
    processes, name = processes_per_node(plan), re.sub(r"[^a-z0-9-]+", "-", job_name(plan).lower()).strip("-") or "plan"
    limits = f'nvidia.com/gpu: "{max(processes)}"' if device_of(plan) == "cuda" else f'cpu: "{max(processes)}"'
    told = 'export NODE="$PET_NODE_RANK" ENDPOINT="$MASTER_ADDR:$MASTER_PORT"\n' if len(processes) > 1 else ""
    text = told + script(plan, plan_path).strip()
    indented = "\n".join(f"{' ' * 18}{line}".rstrip() for line in text.splitlines())
    pod = {"script": indented, "limits": limits}
    workers = f"    Worker:{_POD.format(count=len(processes) - 1, **pod)}" if len(processes) > 1 else ""
    body = f"""
# Fill in IMAGE, an image that has gpipe-planner[exec], and CLAIM, a volume that all pods may write to
# (ReadWriteMany), with the plan in it; then: kubectl create -f this.yaml
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  generateName: {name[:40]}-
spec:
  pytorchReplicaSpecs:
    Master:{_POD.format(count=1, **pod)}{workers}"""
    cannot = [*what_is_rehearsed(plan)]
    if max(processes) != min(processes):
        cannot.append(f"Pods are alike: each asks for {max(processes)} devices, and some use fewer.")
    return Written(body, cannot)
