//! The user of a process, and whether that user's root is the host's root.

use rustix::io::Errno;
use rustix::thread::CapabilitySet;

/// The inode number of the initial user namespace. Source: Linux `include/linux/proc_ns.h`, `PROC_USER_INIT_INO`.
const INITIAL: u64 = 0xEFFF_FFFD;

/// User and group ids that no host should use, because systemd leaves them unused. (A host's `nobody` may have
/// processes, which could signal other processes of `nobody`.) Source: systemd `docs/UIDS-GIDS.md`, "Summary":
/// 2147418112 to 2147483647.
pub const UNUSED_IDS: std::ops::RangeInclusive<u32> = 0x7FFF_0000..=0x7FFF_FFFF;

/// The user namespace of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UserNamespace {
    /// The host's initial namespace.
    Initial,
    /// Another namespace, whose root has no privileges outside of that namespace, or an unknown namespace.
    Other,
}

/// The user of a process. A program determines it once and passes it on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Who {
    /// Effective user id in the process's namespace.
    pub user: u32,
    /// Effective group id in the process's namespace.
    pub group: u32,
    /// The namespace to which the ids belong.
    pub namespace: UserNamespace,
}

impl Who {
    /// Returns the user of this process.
    #[must_use]
    pub fn this_process() -> Self {
        Self {
            user: rustix::process::geteuid().as_raw(),
            group: rustix::process::getegid().as_raw(),
            namespace: namespace(),
        }
    }

    /// Whether this process can mount in its current user namespace, as its root with `CAP_SYS_ADMIN`.
    #[must_use]
    pub fn can_mount_in_its_namespace(self) -> bool {
        let capabilities = || rustix::thread::capabilities(None);
        self.user == 0
            && capabilities().is_ok_and(|it| it.effective.contains(CapabilitySet::SYS_ADMIN))
    }

    /// Whether the user is root of the host, and not only of a user namespace.
    #[must_use]
    pub fn is_host_root(self) -> bool {
        self.user == 0 && self.namespace == UserNamespace::Initial
    }
}

fn namespace() -> UserNamespace {
    match rustix::fs::stat("/proc/self/ns/user") {
        Ok(stat) if stat.st_ino == INITIAL => UserNamespace::Initial,
        // The kernel has no user namespaces.
        Err(Errno::NOENT) if rustix::fs::stat("/proc/self/ns/mnt").is_ok() => {
            UserNamespace::Initial
        }
        _ => UserNamespace::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_of_a_namespace_is_not_the_hosts() {
        let check = |user, namespace, expect| {
            assert_eq!(Who { user, group: 0, namespace }.is_host_root(), expect, "{user}");
        };
        check(0, UserNamespace::Initial, true);
        check(0, UserNamespace::Other, false);
        check(1000, UserNamespace::Initial, false);
        check(1000, UserNamespace::Other, false);
    }
}
