//! Checks the user namespace that a client sends.

use std::os::fd::BorrowedFd;

use container::bundle::userns::IdMap;
use kernel::process::{
    IdMaps, IdRange, Namespace, id_maps, namespace_kind, owner_of_user_namespace, user_namespace_of,
};

use super::users::Peer;
use super::wire::MountsError;

/// Checks a client's user namespace: it must belong to the client's user, and may map only this user and the ids in
/// `given`. So the user gets no access to files that the user could not access before.
pub(super) fn check(
    file: BorrowedFd<'_>,
    peer: &Peer,
    given: &IdMap,
) -> Result<IdMaps, MountsError> {
    let not_one = || MountsError::invalid("userNamespaceFileDescriptor is not a user namespace");
    // The process that talks to the client passes on only user namespaces, so this is a second check.
    if !matches!(namespace_kind(file), Ok(Some(Namespace::User))) {
        return Err(not_one());
    }
    let found = rustix::fs::fstat(file).map_err(|_errno| not_one())?;
    if user_namespace_of(None) == Some((found.st_dev, found.st_ino)) {
        return Err(MountsError::denied(
            "this is the user namespace of the host: the mount service mounts images only for \
            other user namespaces",
        ));
    }
    let failed = |error: kernel::process::ProcessError| {
        MountsError::failed(
            "cannot examine the user namespace; its root must be you, and allow a process of the \
            service to enter it",
            &error,
        )
    };
    let owner = owner_of_user_namespace(file).map_err(failed)?;
    if owner != peer.user {
        return Err(MountsError::denied(format!(
            "the user namespace belongs to user {owner}, not to the caller, user {}",
            peer.user
        )));
    }
    let maps = id_maps(file, (peer.user, peer.group)).map_err(failed)?;
    let (users, groups) = (with(peer.user, given.users()), with(peer.group, given.groups()));
    check_ranges("user", &maps.users, &users)?;
    check_ranges("group", &maps.groups, &groups)?;
    Ok(maps)
}

/// Returns the host ids that a user may map: its own and `given`.
fn with(own: u32, given: &[IdRange]) -> Vec<IdRange> {
    let own = IdRange { inside: 0, outside: own, count: 1 };
    given.iter().copied().chain([own]).collect()
}

fn check_ranges(kind: &str, found: &[IdRange], allowed: &[IdRange]) -> Result<(), MountsError> {
    let end = |it: &IdRange| u64::from(it.outside) + u64::from(it.count);
    let is_within =
        |it: &&IdRange| allowed.iter().any(|may| may.outside <= it.outside && end(it) <= end(may));
    if found.is_empty() {
        return Err(MountsError::invalid(format!("the user namespace has no {kind}s")));
    }
    // The host's root is never allowed, even if /etc/subuid or /etc/subgid lists it.
    let wrong = found.iter().find(|it| it.outside == 0 || !is_within(it));
    match wrong {
        Some(range) => Err(MountsError::denied(format!(
            "the user namespace has {kind}s {} to {} of the host, which /etc/sub{}id does not give you",
            range.outside,
            end(range).saturating_sub(1),
            &kind[..1]
        ))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_has_only_what_its_user_has() {
        let range = |outside, count| IdRange { inside: 0, outside, count };
        let allowed = with(1000, &[range(100_000, 65_536), range(300_000, 10)]);
        let cases: &[(&[IdRange], bool)] = &[
            (&[range(1000, 1)], true),
            (&[range(1000, 1), range(100_000, 65_536)], true),
            (&[range(300_009, 1), range(165_535, 1)], true),
            (&[range(1000, 2)], false),
            (&[range(999, 1)], false),
            (&[range(99_999, 2)], false),
            (&[range(165_535, 2)], false),
            (&[range(1000, 1), range(0, 1)], false),
            (&[range(u32::MAX - 1, 1)], false),
            (&[range(100_000, u32::MAX)], false),
            (&[], false),
        ];
        for (found, expect) in cases {
            assert_eq!(check_ranges("user", found, &allowed).is_ok(), *expect, "{found:?}");
        }
        // Even if a file of subordinate ids lists root.
        assert!(check_ranges("user", &[range(0, 1)], &with(0, &[range(0, 10)])).is_err());
    }
}
