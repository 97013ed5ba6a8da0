# The start stub: the first process of a native job. POSIX sh alone (dash, busybox, bash): a compute node or an image may have nothing else.
#
# It asks before the user's code: `claimed` (made by one only, on whichever node, or by the agent that fenced it), the time by which a start is
# still right, the lease. What it refuses it says in `refused`, by an exit code of its own, and no such code is ever the job's result: that stands
# in `exit` alone. It stops the job at the end of its lease, at its wall limit, when `stop` lies there, and on SIGTERM; each record is renamed into
# place whole. Variables named intertie_* are set above by the agent: job by start_within leased wall grace look.
# Times: wall clock and uptime of this node; a node without nanoseconds gives whole seconds.

umask 077
intertie_too_late=221 intertie_twice=222 intertie_broken=224

intertie_utc() {
    intertie_t=$(date +%s%N)
    case $intertie_t in
        '' | *[!0-9]*) intertie_t=$(date +%s)000000000 ;;
    esac
    printf 'utc_ns=%s\n' "$intertie_t"
    IFS=' ' read -r intertie_up intertie_rest </proc/uptime || intertie_up=0.00
    printf 'boot_ns=%s%s0000000\n' "${intertie_up%%.*}" "$(printf '%.2s' "${intertie_up##*.}00")"
    IFS= read -r intertie_rest </proc/sys/kernel/random/boot_id || intertie_rest=
    printf 'boot_id=%s\n' "$intertie_rest"
}

# Standard input, whole, as the record $1.
intertie_record() {
    cat >"$intertie_job/.$1.part" && mv -f "$intertie_job/.$1.part" "$intertie_job/$1"
}

intertie_refuse() {
    printf 'format=1\nwhy=%s\nwhat=%s\n' "$1" "$2" | intertie_record refused
    exit "$3"
}

# Its lease has passed, or cannot be read: what is not said is no leave to run.
intertie_lease_over() {
    [ "$intertie_leased" = 1 ] || return 1
    intertie_until=
    { IFS= read -r intertie_until <"$intertie_job/lease" || :; } 2>/dev/null
    case $intertie_until in
        '' | *[!0-9]*) return 0 ;;
    esac
    [ "$(date +%s)" -ge "$intertie_until" ]
}

# Pids below $1, whatever session they made for themselves; deepest last.
intertie_below() {
    for intertie_stat in /proc/[0-9]*/stat; do
        IFS= read -r intertie_line 2>/dev/null <"$intertie_stat" || continue
        # shellcheck disable=SC2086
        set -- "$1" ${intertie_line##*) }
        if [ "$3" = "$1" ]; then
            intertie_pid=${intertie_stat#/proc/}
            printf '%s\n' "${intertie_pid%/stat}"
            (intertie_below "${intertie_pid%/stat}")
        fi
    done
}

intertie_signal() {
    # shellcheck disable=SC2046
    kill "-$1" $(intertie_below "$intertie_child") "$intertie_child" 2>/dev/null
}

# Ask, wait as long as it was granted, then no longer. $1: why. The first reason stands.
intertie_end() {
    [ -z "$intertie_stopped" ] || return 0
    intertie_stopped=$1
    [ ! -s "$intertie_job/stop" ] || IFS= read -r intertie_grace <"$intertie_job/stop" || :
    case $intertie_grace in
        '' | *[!0-9]*) intertie_grace=10 ;;
    esac
    intertie_signal TERM
    ( sleep "$intertie_grace"; intertie_signal KILL ) &
    intertie_killer=$!
}

# What a script expects everywhere and a scheduler may leave out: a home that is there (else its work folder), a name, a path, a language.
intertie_usual() {
    intertie_name=$(id -un 2>/dev/null) || intertie_name=
    case $intertie_name in
        '' | *[!A-Za-z0-9_.-]* | [!A-Za-z_]*) intertie_name= ;;
    esac
    if [ -z "${HOME-}" ] && [ -n "$intertie_name" ]; then
        eval "HOME=~$intertie_name"
    fi
    # An account that an image does not know is given `/`, where nothing of it can be written.
    { [ -d "${HOME-}" ] && [ "$HOME" != / ]; } || HOME=$intertie_job/work
    # A shell that was given no PATH has one of its own, and keeps it to itself.
    export HOME PATH="${PATH:-/usr/local/bin:/usr/bin:/bin}" LANG="${LANG:-C.UTF-8}"
    if [ -n "$intertie_name" ]; then
        export USER="${USER:-$intertie_name}" LOGNAME="${LOGNAME:-$intertie_name}"
    fi
}

# In what becomes the job alone: no value of the user's is one of the stub's own, their PATH neither.
intertie_env() {
    [ "$intertie_in_image" = 1 ] || intertie_usual
    intertie_text=
    if [ -f "$intertie_job/env.sh" ]; then
        intertie_text=$(cat "$intertie_job/env.sh") && rm -f "$intertie_job/env.sh" || return 1
    fi
    intertie_cuda=${CUDA_VISIBLE_DEVICES-} intertie_had=${CUDA_VISIBLE_DEVICES+1}
    eval "$intertie_text"
    # Which cards it may see is the scheduler's word, whatever the user's values say.
    [ "$intertie_had" != 1 ] || export CUDA_VISIBLE_DEVICES="$intertie_cuda"
}

cd "$intertie_job" || exit $intertie_broken
if ! mkdir claimed 2>/dev/null; then
    [ -d claimed ] || exit $intertie_broken
    echo "intertie: already started, or given up; not started again" >&2
    exit $intertie_twice
fi
if [ "$intertie_by" -gt 0 ] && [ "$(date +%s)" -ge "$intertie_by" ]; then
    intertie_refuse too_late 'the time for its start had passed' $intertie_too_late
fi
if intertie_lease_over; then
    intertie_refuse too_late 'its lease had passed' $intertie_too_late
fi
: >>log || intertie_refuse broken 'its log cannot be written' $intertie_broken
{ [ ! -f env.sh ] || [ -r env.sh ]; } && cd work || intertie_refuse broken 'its work folder or its environment cannot be used' $intertie_broken

{
    echo format=1
    intertie_utc
    printf 'node=%s\n' "$(uname -n)"
    printf 'native=%s\n' "${SLURM_JOB_ID-}"
    printf 'restarts=%s\n' "${SLURM_RESTART_COUNT-0}"
    printf 'cards=%s\n' "${SLURM_JOB_GPUS-${CUDA_VISIBLE_DEVICES-}}"
} | intertie_record started || exit $intertie_broken

# A script without its interpreter is told apart from one that ends with 127.
intertie_first() {
    set -f
    # shellcheck disable=SC2086
    set -- $1
    set +f
    intertie_interpreter=${1-}
}
IFS= read -r intertie_line <"$intertie_job/script" || :
intertie_first "${intertie_line#??}"
if [ -n "$intertie_interpreter" ] && [ ! -x "$intertie_interpreter" ] && [ "$intertie_in_image" != 1 ]; then
    { printf 'format=1\nrefused=2\nwhat=%s\n' "$intertie_interpreter"; intertie_utc; } | intertie_record exit
    exit 127
fi

# `exec` below leaves signals ignored that a shell ignores in what it runs beside itself: a job must be able to hear its own interrupt.
if env --default-signal=INT,QUIT true 2>/dev/null; then
    set -- env --default-signal=INT,QUIT "$@"
fi
# Found by the site's PATH, not by the user's.
if intertie_found=$(command -v "$1"); then
    shift
    set -- "$intertie_found" "$@"
fi
intertie_stopped= intertie_killer= intertie_heard=0
trap 'intertie_heard=1; IFS= read -r intertie_why <"$intertie_job/.why"; intertie_end "$intertie_why"' USR1
trap 'intertie_heard=1; intertie_end signalled' TERM
# A shell says on its own standard error which signal ended what it waits for, if that dies while it waits; nothing else tells a kill from
# `exit 137`. So nothing of the job is begun before the wait below has begun.
exec 2>"$intertie_job/.died"
(
    trap - INT QUIT TERM USR1
    sleep 0.2 2>/dev/null || sleep 1
    exec </dev/null >>"$intertie_job/log" 2>&1
    intertie_env || exit 126
    exec "$@"
) &
intertie_child=$!
IFS=. read -r intertie_began intertie_rest </proc/uptime

# Looks for a reason to end it, tells the stub, and does it itself if the stub is gone.
intertie_watch() {
    while sleep "$intertie_look" && kill -0 "$intertie_child"; do
        intertie_why=
        IFS=. read -r intertie_up intertie_rest </proc/uptime
        if [ -e "$intertie_job/stop" ]; then
            intertie_why=asked
        elif intertie_lease_over; then
            intertie_why=lease_ended
        elif [ $((intertie_up - intertie_began)) -ge "$intertie_wall" ]; then
            intertie_why=wall_limit
        fi
        if [ -n "$intertie_why" ]; then
            printf '%s\n' "$intertie_why" >"$intertie_job/.why"
            kill -USR1 $$ || intertie_signal KILL
            return
        fi
    done
}
(
    trap - TERM USR1
    intertie_watch
) </dev/null >/dev/null 2>&1 &
intertie_watcher=$!

while :; do
    intertie_heard=0
    wait "$intertie_child"
    intertie_code=$?
    [ "$intertie_heard" = 1 ] || break
    # A signal cut the wait short, or came just after it: what is still to be waited for says so.
    kill -0 "$intertie_child" 2>/dev/null && continue
    wait "$intertie_child"
    intertie_again=$?
    [ "$intertie_again" = 127 ] || intertie_code=$intertie_again
    break
done
kill "$intertie_watcher" $intertie_killer 2>/dev/null

{
    echo format=1
    intertie_utc
    if [ "$intertie_code" -gt 128 ] && { [ -s "$intertie_job/.died" ] || [ -n "$intertie_stopped" ]; }; then
        printf 'signal=%s\n' $((intertie_code - 128))
    else
        printf 'code=%s\n' "$intertie_code"
    fi
    printf 'stopped=%s\n' "$intertie_stopped"
} | intertie_record exit
exit "$intertie_code"
