#!/bin/sh
# Installs the files of this directory, or removes them. Quire runs without this script: bin/quire is enough.
set -eu
# Directories that are made here are for all users.
umask 022

usage() {
    cat <<'EOF'
Usage: install.sh [--prefix DIR] [--helpers DIR] [--composefs] [--uninstall]

  --prefix DIR   Directory of bin, lib and share (default /usr/local)
  --helpers DIR  Directory in which mount(8) looks for mount.quire (default: as for the prefix)
  --composefs    Also install mkcomposefs, composefs-info and composefs-dump
  --uninstall    Remove what this version installs with the same options; stores and /etc/quire stay

DESTDIR in the environment is put in front of all paths, for packagers.
EOF
}

fail() {
    echo "install.sh: $1" >&2
    exit 2
}

prefix=/usr/local helpers='' composefs=false uninstall=false
while [ $# -gt 0 ]; do
    case $1 in
        --prefix=* | --helpers=*) ;;
        --prefix | --helpers)
            [ $# -gt 1 ] || fail "$1 needs a directory"
            option=$1 value=$2
            shift 2
            set -- "$option=$value" "$@"
            ;;
    esac
    case $1 in
        --prefix=*) prefix=${1#*=} ;;
        --helpers=*) helpers=${1#*=} ;;
        --composefs) composefs=true ;;
        --uninstall) uninstall=true ;;
        -h | --help) usage; exit 0 ;;
        *) usage >&2; fail "unexpected argument: $1" ;;
    esac
    shift
done
root=${DESTDIR:-}
root=${root%/} prefix=${prefix%/} helpers=${helpers%/}
case $prefix in /*) ;; *) fail 'the prefix must be an absolute path below /' ;; esac
# sed and systemd would read these characters in another way.
case $prefix in *[\&\|\\\ ]*) fail 'the prefix must not contain a space, &, | or a backslash' ;; esac
if [ -z "$helpers" ]; then
    helpers=$prefix/sbin
    case $prefix in
        /usr | /usr/local)
            helpers=/usr/sbin
            # If /usr is not merged, mount(8) does not look in /usr/sbin.
            if [ -d "$root/sbin" ] && [ ! -L "$root/sbin" ]; then helpers=/sbin; fi
            ;;
    esac
fi
case $helpers in /*) ;; *) fail 'the directory of helpers must be an absolute path' ;; esac
here=$(cd -- "$(dirname -- "$0")" && pwd)
documents=$prefix/share/doc/quire
# Nothing is removed before it is certain that all files are here.
if [ ! -f "$here/bin/quire" ] || [ ! -d "$here/lib" ] || [ ! -d "$here/share" ]; then
    fail 'run it in the unpacked tarball of a release'
fi

# Installs a file of this directory: its path, mode, and path below the root.
put() {
    if $uninstall; then
        rm -f -- "$root$3"
        return
    fi
    mkdir -p -- "$root$(dirname -- "$3")"
    # A running program cannot be written, but it can be replaced.
    new=$root$3.new
    rm -f -- "$new"
    case $3 in
        */systemd/system/*) sed "s|/usr/bin/quire|$prefix/bin/quire|g" "$here/$1" >"$new" ;;
        *) cp -- "$here/$1" "$new" ;;
    esac
    chmod "$2" -- "$new"
    mv -f -- "$new" "$root$3"
}

# Links a path below the root to the binary. Other programs of that name stay.
link() {
    folder=$(dirname -- "$1")
    directory=$root$folder
    # The path of the binary relative to the link's directory.
    up=''
    while [ "${binary#"$folder"/}" = "$binary" ]; do
        folder=${folder%/*}
        up=../$up
    done
    target=$up${binary#"$folder"/}
    if [ -e "$root$1" ] || [ -L "$root$1" ]; then
        if [ "$(readlink -- "$root$1" || true)" != "$target" ]; then
            $uninstall || echo "$root$1 stays, because it is another program"
            return
        fi
        rm -f -- "$root$1"
    fi
    if $uninstall; then return; fi
    mkdir -p -- "$directory"
    ln -s -- "$target" "$root$1"
}

# Names programs that Quire calls and that are not installed, and the command that installs their packages.
name_missing() {
    missing='' packages=''
    for row in newuidmap:uidmap:shadow-utils pasta:passt:passt fusermount3:fuse3:fuse3; do
        program=${row%%:*} names=${row#*:}
        if command -v "$program" >/dev/null; then continue; fi
        missing="$missing, $program"
        if [ "$1" = dnf ]; then packages="$packages ${names#*:}"; else packages="$packages ${names%:*}"; fi
    done
    if ! command -v crun >/dev/null && ! command -v runc >/dev/null; then
        missing="$missing, crun or runc" packages="$packages crun"
    fi
    if [ -z "$missing" ]; then return; fi
    echo "Quire calls these programs, which are not installed: ${missing#, }"
    if [ -n "$1" ]; then echo "to install them: $1 install$packages"; fi
}

binary=$prefix/bin/quire
put bin/quire 755 "$binary"
# None of these names has a space.
for file in $(cd -- "$here" && find lib share -type f); do
    case $file in
        */mkcomposefs.1 | */composefs-*.1) if ! $composefs && ! $uninstall; then continue; fi ;;
    esac
    put "$file" 644 "$prefix/$file"
done
for file in CHANGELOG.md LICENSE-APACHE LICENSE-MIT THIRD-PARTY-NOTICES.txt; do
    put "$file" 644 "$documents/$file"
done
link "$helpers/mount.quire"
link "$helpers/mount.composefs"
link "$prefix/bin/quire-image-verifier"
if $composefs; then
    for name in mkcomposefs composefs-info composefs-dump; do
        link "$prefix/bin/$name"
    done
fi
if $uninstall; then
    rmdir -- "$root$documents" 2>/dev/null || true
    echo "removed from $root$prefix; stores and /etc/quire stay"
    exit 0
fi
echo "installed below $root$prefix"
if [ -z "$root" ]; then
    manager=''
    for name in apt-get dnf; do
        if [ -z "$manager" ] && command -v "$name" >/dev/null; then manager=$name; fi
    done
    name_missing "$manager"
fi
if [ -z "$root" ] && [ -d /run/systemd/system ]; then
    echo 'systemd reads the units after: systemctl daemon-reload'
fi
