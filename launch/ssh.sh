#!/usr/bin/env bash
# A training job over plain ssh, one process a host: launch/ssh.sh HOST,HOST,... --config FILE [section.key=value ...]
#
# The first host is the coordinator. All hosts have this folder at the same path, and keys or an agent let ssh in without
# asking. Where one process fails, or this script ends in any way, the processes of all hosts are ended.
#
#   PORT=8476  DIRECTORY=$PWD  PYTHON=.venv/bin/python    what else can be said, in the environment
set -euo pipefail
if (($# < 2)); then
  echo "Usage: $0 HOST,HOST,... --config FILE [section.key=value ...]" >&2
  exit 2
fi
IFS=, read -ra hosts <<<"$1"
shift
command=("${PYTHON:-.venv/bin/python}" -m zaya_jax.main "$@" --coordinator "${hosts[0]#*@}:${PORT:-8476}"
  --processes "${#hosts[@]}")

# What a host runs. Its standard input is open for as long as the launcher lives; then comes TERM, and KILL after 5 seconds
# for a process that does not end.
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

# Each argument in single quotes, as any login shell reads it.
quoted() { printf " '%s'" "${@//\'/\'\\\'\'}"; }

pipes=$(mktemp -d)
mkfifo "$pipes/alive"
exec 9<>"$pipes/alive" # its other end is every ssh's standard input
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
