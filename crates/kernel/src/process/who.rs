//! Who a process is: its user, and whether the kernel takes that user's root for the host's.

use rustix::io::Errno;
use rustix::thread::CapabilitySet;

/// The inode of the user namespace that the kernel starts with. Source: Linux `include/linux/proc_ns.h`,
/// `PROC_USER_INIT_INO`.
const INITIAL: u64 = 0xEFFF_FFFD;

/// Numbers of users and groups that no host should have: systemd leaves them unused. A host's `nobody` has processes of its own,
/// which can send signals to all others that are `nobody`. Source: systemd `docs/UIDS-GIDS.md`, "Summary":
/// 2147418112 to 2147483647.
pub const UNUSED_IDS: std::ops::RangeInclusive<u32> = 0x7FFF_0000..=0x7FFF_FFFF;

/// The user namespace that a process is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UserNamespace {
    /// The host's.
    Initial,
    /// Another one, whose root has no power outside of it; or an unknown one.
    Other,
}

/// Who a process is. A program finds that once, and passes it on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Who {
    /// The effective user, as its namespace numbers them.
    pub user: u32,
    /// The effective group.
    pub group: u32,
    /// Where these numbers count.
    pub namespace: UserNamespace,
}

impl Who {
    /// Who this process is.
    #[must_use]
    pub fn this_process() -> Self {
        Self {
            user: rustix::process::geteuid().as_raw(),
            group: rustix::process::getegid().as_raw(),
            namespace: namespace(),
        }
    }

    /// Whether this process can mount in its user namespace as it is: as its root, with the capability for that.
    #[must_use]
    pub fn can_mount_in_its_namespace(self) -> bool {
        let capabilities = || rustix::thread::capabilities(None);
        self.user == 0
            && capabilities().is_ok_and(|it| it.effective.contains(CapabilitySet::SYS_ADMIN))
    }

    /// Whether it is root of the host, and not only of a user namespace.
    #[must_use]
    pub fn is_host_root(self) -> bool {
        self.user == 0 && self.namespace == UserNamespace::Initial
    }
}

fn namespace() -> UserNamespace {
    match rustix::fs::stat("/proc/self/ns/user") {
        Ok(stat) if stat.st_ino == INITIAL => UserNamespace::Initial,
        // A kernel without user namespaces.
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
