# AppArmor profile of Quire's containers. `quire run` gives it to containers of root. Containers of other users,
# --privileged and --security-opt apparmor=unconfined go without. Syntax: apparmor.d(5).
#
# Changes that should survive an upgrade belong in /etc/apparmor.d/local/quire-default. Afterwards, load the profile:
# apparmor_parser --replace /etc/apparmor.d/quire-default

# Paths that lead out of the container's root (open descriptors, deleted files) are judged, too, as if they began there.
profile quire-default flags=(attach_disconnected, mediate_deleted) {
  # By default everything is allowed: namespaces, capabilities and the seccomp filter decide.
  file,
  network,
  unix,
  capability,
  umount,

  # Signals come from anybody who may send them: Quire, the runtime, whatever their own profiles are called. They go to
  # processes of containers only.
  signal (receive),
  signal (send) peer=quire-default,

  # The same for debuggers.
  ptrace (readby, tracedby),
  ptrace (read, trace) peer=quire-default,

  # Nothing is mounted, remounted or moved inside, so a read-only or hidden path stays so. pivot_root has no rule, which
  # denies it.
  deny mount,

  # /proc: only a process's own directory can be written to, and the limits of System V shared memory, which belong to the
  # container's IPC namespace.
  deny /proc/* w,
  deny /proc/[^1-9s]*/** w,
  deny /proc/s[^y]*/** w,
  deny /proc/sy[^s]*/** w,
  deny /proc/sys[^/]*/** w,
  deny /proc/sys/[^k]** w,
  deny /proc/sys/k[^e]** w,
  deny /proc/sys/kernel/[^s]** w,
  deny /proc/sys/kernel/s[^h]** w,
  deny /proc/sys/kernel/sh[^m]** w,

  # These show the host's memory, or command its kernel.
  deny /proc/kcore rwklx,
  deny /proc/sysrq-trigger rwklx,

  # /sys: only cgroups can be written to.
  deny /sys/[^f]** wklx,
  deny /sys/f[^s]** wklx,
  deny /sys/fs/[^c]** wklx,
  deny /sys/fs/c[^g]** wklx,
  deny /sys/fs/cg[^r]** wklx,

  # Firmware, and the files of security modules: AppArmor's own policy among them.
  deny /sys/firmware/** rwklx,
  deny /sys/kernel/security/** rwklx,

  include if exists <local/quire-default>
}
