# Functions of the set-up scripts. Sourced, not run.

say() { printf '==> %s\n' "$*" >&2; }

fail() {
    printf 'error: %s\n' "$1" >&2
    shift
    printf '       %s\n' "$@" >&2
    exit 1
}

# Install Debian packages where that is possible without a question; 1 where it is not.
apt_install() {
    local as_root=()
    command -v apt-get >/dev/null || return 1
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null && sudo -n true 2>/dev/null || return 1
        as_root=(sudo -n)
    fi
    say "apt-get install $*"
    "${as_root[@]}" apt-get update -qq >&2 || true
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "$@" >&2
}
