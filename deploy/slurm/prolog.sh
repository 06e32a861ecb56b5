#!/bin/bash
# Slurm Prolog: a job submitted with --comment=datasvc:NAME[@VERSION|@TAG] finds its data set on the way when it starts.
# Explained in docs/how-to/cluster.md. Runs as root on every node of the job, before it.
#
# It asks the node's datasvc to stage and does not wait: the loader streams what has not arrived yet. Whatever goes
# wrong here is logged and the job starts all the same, because a Prolog that fails takes the node out of service.

set -u
PATH=/usr/bin:/bin
node=${DATASVC_NODE:-http://127.0.0.1:8765}
token_file=${DATASVC_TOKEN_FILE:-/etc/datasvc/token}
state=${DATASVC_STATE:-/run/datasvc}

# The comment is the user's: only what can be a name gets any further.
[[ ${SLURM_JOB_COMMENT:-} =~ ^datasvc:([a-z0-9][a-z0-9._-]*(@[a-z0-9][a-z0-9._-]*)?)$ ]] || exit 0
reference=${BASH_REMATCH[1]}

note() { logger -t datasvc-prolog "job ${SLURM_JOB_ID:-?}: $1" 2>/dev/null || echo "datasvc-prolog: $1" >&2; }

# The token goes through a pipe: a command line can be read by everybody on the node.
answer=$(curl --silent --show-error --fail --max-time 10 --noproxy '*' \
    --header @<(printf 'Authorization: Bearer %s\n' "$(<"$token_file")") \
    --header 'Content-Type: application/json' \
    --data "{\"ref\": \"$reference\"}" "$node/stage" 2>&1) || { note "cannot stage $reference: $answer"; exit 0; }

# Kept for the Epilog, which cancels what the job does not need any more.
if [[ $answer =~ \"id\":\ *\"([0-9a-f]+)\" ]]; then
    mkdir -p -m 0700 "$state" && printf '%s\n' "${BASH_REMATCH[1]}" > "$state/job-$SLURM_JOB_ID"
    note "staging $reference as ${BASH_REMATCH[1]}"
fi
exit 0
