#!/usr/bin/env bash
# A training job over plain ssh, one process per host: launch/ssh.sh HOST,HOST,... --config FILE [section.key=value ...]
#
# The first host is the coordinator. All hosts need this folder at the same path, and ssh must work without a password. If
# one process fails, or this script ends for any reason, the processes on all hosts are stopped.
#
# Environment variables, with their defaults: PORT=8476  DIRECTORY=$PWD  PYTHON=.venv/bin/python
set -euo pipefail
if (($# < 2)); then
  echo "Usage: $0 HOST,HOST,... --config FILE [section.key=value ...]" >&2
  exit 2
fi
IFS=, read -ra hosts <<<"$1"
shift
command=("${PYTHON:-.venv/bin/python}" -m zaya_jax.main "$@" --coordinator "${hosts[0]#*@}:${PORT:-8476}"
  --processes "${#hosts[@]}")

# What a host runs. Its standard input closes when the launcher ends; the process then gets TERM, and KILL after 5 seconds.
# shellcheck disable=SC2016
remote='cd "$1" || exit
shift
exec 3<&0 </dev/null
"$@" 3<&- &
process=$!
{ cat <&3; kill $process; for i in {1..10}; do sleep 0.5; kill -0 $process || exit; done; kill -9 $process; } \
  >/dev/null 2>&1 &
watch=$!
wait $process
status=$?
kill $watch 2>/dev/null
exit $status'

# Put each argument in single quotes, which every login shell understands.
quoted() { printf " '%s'" "${@//\'/\'\\\'\'}"; }

pipes=$(mktemp -d)
mkfifo "$pipes/alive"
exec 9<>"$pipes/alive" # its other end is the standard input of every ssh
stop() {
  exec 9>&-
  wait || true
}
trap 'rm -rf "$pipes"' EXIT
trap 'stop; exit 143' TERM
trap 'stop; exit 130' INT

for index in "${!hosts[@]}"; do
  line=$(quoted bash -c "$remote" zaya "${DIRECTORY:-$PWD}" "${command[@]}" --process "$index")
  ssh -o BatchMode=yes -o ServerAliveInterval=15 "${hosts[index]}" "$line" <"$pipes/alive" 9>&- &
done

status=0
for _ in "${hosts[@]}"; do
  wait -n || { status=$? && break; }
done
stop
exit "$status"
