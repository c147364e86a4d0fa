#!/bin/sh
# The training of train.py on two machines. Call it on each, with the machine's number and machine 0's address:
#
#     examples/two_machines.sh 0 192.168.1.100 --epochs 10 --global-batch 64       # on 192.168.1.100
#     examples/two_machines.sh 1 192.168.1.100 --epochs 10 --global-batch 64       # on the other one
#
# Whatever follows is train.py's. The last line is the digest that one machine alone comes to.
#
#     NPROC=4     processes on this machine: 1 if left out, or `auto` for one per GPU
#     PORT=29500  a port of machine 0 that the others can reach
#
# Each machine needs the same code and data. Runs are kept by machine 0: a shared disk is not needed. Start both again
# after whatever happened, and they go on. The way between them is the one to machine 0's address; GLOO_SOCKET_IFNAME
# and NCCL_SOCKET_IFNAME choose another.
#
# Other ways to say the same, here with four processes on each machine:
#
#     torchrun --nnodes=2 --nproc_per_node=4 --node_rank=0 --master_addr=192.168.1.100 --master_port=29500 train.py
#
#     export MASTER_ADDR=192.168.1.100 MASTER_PORT=29500 WORLD_SIZE=8
#     RANK=0 lockstep run -n 4 train.py           # RANK: the first process of this machine; on the other one it is 4
#     RANK=0 python spawn.py --nproc 4            # also for a script that starts its processes itself
#
# torchrun itself does not read RANK and WORLD_SIZE: so started, two machines train two models without a word about it.

set -eu
if [ $# -lt 2 ]; then
    echo "usage: $0 NUMBER_OF_THIS_MACHINE ADDRESS_OF_MACHINE_0 [options of train.py]" >&2
    exit 2
fi
node_rank=$1 master_addr=$2
shift 2
exec "${PYTHON:-python}" -m lockstep run --nnodes 2 --node-rank "$node_rank" --nproc-per-node "${NPROC:-1}" \
    --master-addr "$master_addr" --master-port "${PORT:-29500}" "$(dirname "$0")/train.py" "$@"
