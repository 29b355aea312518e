//! Who a process is: its user, and whether the kernel takes that user's root for the host's.

use rustix::io::Errno;

/// The inode of the user namespace that the kernel starts with. Source: Linux `include/linux/proc_ns.h`,
/// `PROC_USER_INIT_INO`.
const INITIAL: u64 = 0xEFFF_FFFD;

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
