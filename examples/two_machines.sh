#!/bin/sh
# Run train.py on two machines. Call this on each, with the machine's number and the address of machine 0:
#
#     examples/two_machines.sh 0 192.168.1.100 --epochs 10 --global-batch 64       # on 192.168.1.100
#     examples/two_machines.sh 1 192.168.1.100 --epochs 10 --global-batch 64       # on the other
#
# Further arguments go to train.py. The digest in the last line is the same as on one machine.
#
#     NPROC=4     processes on this machine; default 1, `auto` for one per GPU
#     PORT=29500  a port of machine 0 that the others can reach
#
# Each machine needs the same code and data. Machine 0 holds the run folder; a shared disk is not needed. After any
# failure, start both again, and they resume. They communicate over the interface that leads to machine 0's address; set
# GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to use another.
#
# Other ways to start the same job, here with four processes on each machine:
#
#     torchrun --nnodes=2 --nproc_per_node=4 --node_rank=0 --master_addr=192.168.1.100 --master_port=29500 train.py
#
#     export MASTER_ADDR=192.168.1.100 MASTER_PORT=29500 WORLD_SIZE=8
#     RANK=0 lockstep run -n 4 train.py           # RANK: the first rank of this machine; 4 on the other
#     RANK=0 python spawn.py --nproc 4            # also for a script that starts its processes itself
#
# torchrun itself ignores RANK and WORLD_SIZE: with these variables alone, two machines silently train two models.

set -eu
if [ $# -lt 2 ]; then
    echo "usage: $0 NUMBER_OF_THIS_MACHINE ADDRESS_OF_MACHINE_0 [options of train.py]" >&2
    exit 2
fi
node_rank=$1 master_addr=$2
shift 2
exec "${PYTHON:-python}" -m lockstep run --nnodes 2 --node-rank "$node_rank" --nproc-per-node "${NPROC:-1}" \
    --master-addr "$master_addr" --master-port "${PORT:-29500}" "$(dirname "$0")/train.py" "$@"
