"""Commands that stand in for those of clusters, in the directory of this file.

srun          starts SLURM_NTASKS tasks on this machine with the variables that Slurm sets, each
              in a process group of its own, and writes their ids to STANDIN_PIDS
squeue        prints STANDIN_STATE, the state of the job
scontrol      appends its arguments to STANDIN_SCONTROL
ssh           runs the command in a shell on this machine; like the real one, it does not pass
              signals on
xpk           runs the value of --command in a shell, as the container would
maxtext-olmo  runs STANDIN_COMMAND with the arguments after the first
"""
