"""`lockstep submit`: write the sbatch script or Kubernetes manifest that starts a job on many machines."""
