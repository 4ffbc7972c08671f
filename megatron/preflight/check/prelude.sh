# shellcheck shell=bash
# Read by bash before a batch script that is followed without acting (follow.py). The text that comes after it was changed
# by shell_text.py: it writes into a scratch folder, and programs by path go through __pf_run. Here stands what the rest of
# the guard is made of: PATH leads only to tools that change nothing, every other name is recorded instead of run, and a
# DEBUG trap, whose failure makes bash skip a command (extdebug), looks at each simple command once more.

# shellcheck disable=SC2153,SC2154 # given by follow.py
__pf_scratch=$__PF_SCRATCH __pf_python=$__PF_PYTHON __pf_here=$__PF_HERE __pf_steps_left=$__PF_STEPS
unset __PF_SCRATCH __PF_PYTHON __PF_HERE __PF_STEPS
__pf_bin=$__pf_scratch/bin
PATH=$__pf_bin

# ---- what happened, for follow.py

# KIND WORD...: one record, with the place in the script that led here, and the environment.
__pf_record() {
    local kind=$1 i=0 file line
    shift
    while [[ ${BASH_SOURCE[i + 1]:-} == "$__pf_here"/* ]]; do i=$((i + 1)); done
    file=${BASH_SOURCE[i + 1]:-} line=${BASH_LINENO[i]:-0}
    {
        printf '%s\0' RECORD "$kind" "$file" "$line" "$PWD" "${__PF_STEP:-0}" "$#" "$@"
        "$__pf_bin/.env" -0
        printf '\0'
    } > "$__pf_scratch/record.$BASHPID"
    "$__pf_bin/cat" "$__pf_scratch/record.$BASHPID" >> "$__pf_scratch/records"
    return 0
}

# ---- files

# The name under which the script's own files lie in the scratch folder.
__pf_mapped() {
    local path
    path=$("$__pf_bin/realpath" -ms -- "$*" 2> /dev/null) || path=/unnamed
    path=${path#"$__pf_scratch/files"} # where the script went into a folder that it made
    printf '%s' "$__pf_scratch/files$path"
}

__pf_out() {
    local mapped
    case "$*" in
        /dev/null | /dev/stdout | /dev/stderr | /dev/fd/[0-9]*) printf '%s' "$*" ;;
        *)
            mapped=$(__pf_mapped "$*")
            "$__pf_bin/.mkdir" -p -- "${mapped%/*}"
            printf '%s' "$mapped"
            ;;
    esac
}

__pf_out_or_fd() {
    if [[ $* =~ ^[0-9]+-?$|^-$ ]]; then printf '%s' "$*"; else __pf_out "$*"; fi
}

__pf_in() {
    local mapped
    case "$*" in
        /dev/tcp/* | /dev/udp/*) printf /dev/null ;;
        *)
            mapped=$(__pf_mapped "$*")
            if [[ -e $mapped ]]; then printf '%s' "$mapped"; else printf '%s' "$*"; fi
            ;;
    esac
}

# ---- texts

# A copy of a file that can be run; the file's own name where it cannot be read.
__pf_source() {
    local file
    file=$(__pf_in "$*")
    if [[ -f $file && -r $file ]] && "$__pf_python" -I -S "$__pf_here/copies.py" "$__pf_scratch" "$file" "$*"; then
        return 0
    fi
    __pf_record missing "$*"
    # Only a name that leads nowhere gives bash's own message; a pipe or a device could hold any text.
    if [[ -e $file ]]; then printf /dev/null; else printf '%s' "$*"; fi
}

__pf_text() {
    "$__pf_python" -I -S "$__pf_here/copies.py" "$__pf_scratch" --text "$*"
}

# TEXT WORD...: run a text as bash -c does.
__pf_run_text() {
    local __pf_copy
    __pf_copy=$(printf '%s' "$1" | "$__pf_python" -I -S "$__pf_here/copies.py" "$__pf_scratch" - "bash -c")
    shift
    builtin source "$__pf_copy"
}

# FILE WORD...: run a script by its name.
__pf_run_file() {
    local __pf_file __pf_copy __pf_first=
    __pf_file=$(__pf_in "$1")
    if [[ -f $__pf_file && -r $__pf_file ]]; then IFS= read -r -n 200 __pf_first < "$__pf_file" 2> /dev/null || :; fi
    case $__pf_first in
        '#!'*python*) __pf_record python "${__pf_first##*[/ ]}" "$@" ;;
        '#!'*sh*)
            __pf_copy=$(__pf_source "$1")
            shift
            builtin source "$__pf_copy"
            ;;
        *) __pf_record skipped "$@" ;;
    esac
    return 0
}

# ---- programs

# Run what a word turned out to be.
__pf_run() {
    (($#)) || return 0
    while [[ ${1-} == [A-Za-z_]*=* && ${1%%=*} != *[!A-Za-z0-9_]* ]]; do return 127; done
    case $1 in
        exec)
            shift
            __pf_exec "$@"
            ;;
        command) __pf_command "${@:2}" ;;
        builtin | eval | source | . | enable | hash | history | fc | set | shopt | alias) __pf_record unfollowed "$@" ;;
        */*) __pf_external "$@" ;;
        *)
            case $(type -t -- "$1") in
                # By its name, so that the guard sees which function is entered.
                function) if [[ $1 =~ ^[A-Za-z0-9_.:+-]+$ ]]; then builtin eval "$1 \"\${@:2}\""; else __pf_record skipped "$@"; fi ;;
                builtin) "$@" ;;
                *) __pf_external "$@" ;;
            esac
            ;;
    esac
}

__pf_exec() {
    while [[ ${1-} == -[cla]* ]]; do
        [[ $1 == -a ]] && shift
        shift
    done
    __pf_run "$@"
    builtin exit
}

# shellcheck source=megatron/preflight/check/programs.sh
source "$__pf_here/programs.sh"

# ---- the guard

# shellcheck disable=SC2016 # a pattern
# Pieces of a command in which > is no redirection: quoted text (also with variables and simple substitutions), arithmetic.
__pf_pieces='^('\''[^'\'']*'\''|"([^"\$`]|\\.|\$[^(`"]|\$\([^()"`]*\)|\$\(\([^()]*\)\))*\$?"|\$'\''([^'\''\]|\\.)*'\'
__pf_pieces+='|\\.|\$\(\([^()]*\)\)|\$\{[^{}"`>]*\}|\$|[^"'\''\$>]+)'

# shellcheck disable=SC2016 # a pattern
# exec that starts nothing.
__pf_only_redirections='^exec([[:space:]]+([0-9]+|\{[A-Za-z_]+\})?(&>>|&>|>>|>\||<>|>&|<&|>|<)[[:space:]]*'
__pf_only_redirections+='("\$\(__pf_(out|in|out_or_fd) .*\)"|[0-9]+-?|-|/dev/null|[<>]\(.*\)))*$'

__pf_heredoc='(^|[^<])<<-?[^<]'

# Whether a command redirects its output to something that shell_text.py has not seen.
__pf_writes() {
    local command=$1 operator
    # A here-document is text; what is expanded in it was read by shell_text.py.
    [[ ${command%%$'\n'*} =~ $__pf_heredoc ]] && command=${command%%$'\n'*}
    [[ $command == *'>'* ]] || return 1
    for operator in '&>>' '&>' '>>' '>|' '<>' '>&' '>'; do
        command=${command//"$operator \"\$(__pf_out"/}
        command=${command//"$operator /dev/null"/}
    done
    command=${command//'>&'[0-9-]/}
    command=${command//'>('/}
    while [[ $command =~ $__pf_pieces ]]; do command=${command:${#BASH_REMATCH[0]}}; done
    [[ $command == *'>'* ]]
}

# shellcheck disable=SC2016 # text of the script
# Whether a command, as bash prints it, may not run: 0 where it may not. Asked behind a `!`, which set -e does not heed.
__pf_denied() {
    local command=$1 first
    PATH=$__pf_bin
    if ((--__pf_steps_left < 0)); then
        __pf_record endless
        builtin exit 97
    fi
    # Simple values before a command; others were read by shell_text.py.
    while [[ $command =~ ^[A-Za-z_][A-Za-z0-9_]*\+?=([^][:space:]\'\"\\\$\`\(\)\<\>\;\&\|]|\'[^\']*\'|\"([^\"\\\$\`]|\$[A-Za-z0-9_])*\"|\$[A-Za-z0-9_])*[[:space:]]+ ]]
    do command=${command:${#BASH_REMATCH[0]}}; done
    first=${command%%[[:space:]]*}
    case $first in
        '[[' | '(('* | for | case | select | __pf_*) return 1 ;;
        hash | history | fc | enable | suspend | bind | restricted | alias | unalias) first= ;;
        exec) [[ $command =~ $__pf_only_redirections ]] || first= ;;
        eval) [[ $command == 'eval "$(__pf_text '* || $command == eval ]] || first= ;;
        source | .) [[ $command == *'"$(__pf_source '* || $command == '. "$__pf_main"' ]] || first= ;;
        builtin) [[ $command =~ ^builtin[[:space:]]+(cd|echo|printf|read|pwd|test|true|export|local|declare|set)[[:space:]] ]] || first= ;;
        set) [[ $command =~ functrace|posix|[+-][A-Za-z]*[Tmr]|monitor ]] && first= ;;
        shopt) [[ $command == *extdebug* ]] && first= ;;
        *=*) return 1 ;;
        */* | [\$\"\'\`~\\]*) first= ;;
    esac
    [[ $command != */dev/tcp/* && $command != */dev/udp/* ]] || first=
    [[ -n $first ]] && ! __pf_writes "$command" && return 1
    __pf_record unfollowed "$1"
}

for __pf_name in srun sbcast module ml scontrol squeue sinfo sacct sbatch scancel python python3 torchrun deepspeed bash sh \
    ssh hostname getent nproc sleep which mkdir touch mktemp cp tee env nohup timeout nice stdbuf numactl taskset rocm-smi \
    nvidia-smi "$__pf_bin"/*; do
    __pf_name=${__pf_name##*/}
    builtin eval "$__pf_name() { __pf_external $__pf_name \"\$@\"; }"
done
unset __pf_name
command_not_found_handle() { __pf_external "$@"; }
command() { __pf_command "$@"; }
__pf_command() {
    case ${1-} in
        -v | -V) builtin command "$@" ;;
        -p) shift; __pf_external "$@" ;;
        *) case $(type -t -- "${1-}") in builtin) __pf_run "$@" ;; *) __pf_external "$@" ;; esac ;;
    esac
}
trap() { __pf_record trap "$@"; }
kill() { __pf_record skipped kill "$@"; }
cd() { __pf_cd "$@"; }
__pf_cd() {
    local mapped
    builtin cd "$@" 2> /dev/null && return 0
    mapped=$(__pf_mapped "${*: -1}")
    if [[ ! -d $mapped ]]; then
        __pf_record missing "${*: -1}"
        mapped=${*: -1}
    fi
    builtin cd -- "$mapped" || return
}
__pf_at_exit() {
    local code=$1
    __pf_record end "$code" "${__pf_last_file-}" "${__pf_last_line-}"
}

# shellcheck disable=SC2046 # names of functions
readonly -f $(compgen -A function __pf_) command_not_found_handle command trap kill
shopt -s extdebug
set -T
builtin trap '__pf_at_exit $?' EXIT
# shellcheck disable=SC2154,SC2016
builtin trap '[[ ${FUNCNAME[0]:-} == __pf_* ]] || { [[ ${BASH_SOURCE[0]:-$__pf_here/} == "$__pf_here"/* ]] || __pf_last_line=$LINENO __pf_last_file=${BASH_SOURCE[0]:-}; ! __pf_denied "$BASH_COMMAND"; }' DEBUG
# Only now may the script be read: follow.py asks for this.
__pf_ready=yes
