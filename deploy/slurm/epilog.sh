#!/bin/bash
# Slurm Epilog: cancels what deploy/slurm/prolog.sh began, if it still runs. What has arrived stays for the next job.
# Explained in docs/how-to/cluster.md. Runs as root on every node of the job, after it, however it ended.

set -u
PATH=/usr/bin:/bin
node=${DATASVC_NODE:-http://127.0.0.1:8765}
token_file=${DATASVC_TOKEN_FILE:-/etc/datasvc/token}
kept=${DATASVC_STATE:-/run/datasvc}/job-${SLURM_JOB_ID:-none}

[[ -f $kept ]] || exit 0
read -r id < "$kept"
rm -f "$kept"
[[ $id =~ ^[0-9a-f]+$ ]] || exit 0
curl --silent --output /dev/null --max-time 10 --noproxy '*' --request DELETE \
    --header @<(printf 'Authorization: Bearer %s\n' "$(<"$token_file")") "$node/stage/$id"
# The holds of the job's processes went with them: nothing else is to be cleaned up.
exit 0
