//! Converts POSIX ACLs of an image for a user namespace that lacks some of the ids.

use std::borrow::Cow;
use std::collections::HashMap;

use crate::bundle::userns::OwnIds;

/// Source: Linux `include/uapi/linux/posix_acl_xattr.h`, `POSIX_ACL_XATTR_VERSION`.
const VERSION: [u8; 4] = 2_u32.to_le_bytes();
/// Source: Linux `include/uapi/linux/posix_acl.h`, `ACL_USER`.
const USER: u16 = 0x02;
/// Source: Linux `include/uapi/linux/posix_acl.h`, `ACL_GROUP`.
const GROUP: u16 = 0x08;
/// Size of an entry in bytes: tag, permissions and id. Source: `struct posix_acl_xattr_entry`.
const ENTRY: usize = 8;

/// Returns the value of an xattr for a user namespace. In ACLs, users and groups that the namespace lacks are replaced
/// in the same way as owners of files ([`OwnIds::user`]), since the kernel refuses an ACL that names them (Linux
/// `fs/posix_acl.c`, `posix_acl_valid`). If several are replaced by the same id, that id gets the permissions that all
/// of them have. All other values are unchanged.
#[must_use]
pub fn acl_for_ids<'v>(name: &[u8], value: &'v [u8], ids: &OwnIds) -> Cow<'v, [u8]> {
    let is_acl = [&b"system.posix_acl_access"[..], b"system.posix_acl_default"].contains(&name);
    let Some(entries) = value.strip_prefix(&VERSION).filter(|_| is_acl) else {
        return Cow::Borrowed(value);
    };
    // The kernel refuses a value with an incomplete entry.
    if !entries.len().is_multiple_of(ENTRY) {
        return Cow::Borrowed(value);
    }
    let mut kept: Vec<[u8; ENTRY]> = Vec::new();
    // The image determines the number of entries: an xattr has space for 8191.
    let mut places: HashMap<(u16, u32), usize> = HashMap::new();
    for entry in entries.chunks_exact(ENTRY) {
        let [t0, t1, p0, p1, i0, i1, i2, i3] = *entry else { continue };
        let id = u32::from_le_bytes([i0, i1, i2, i3]);
        let tag = u16::from_le_bytes([t0, t1]);
        let (id, is_named) = match tag {
            USER => (ids.user(id), true),
            GROUP => (ids.group(id), true),
            _ => (id, false),
        };
        if is_named {
            let place = *places.entry((tag, id)).or_insert(kept.len());
            if let Some(first) = kept.get_mut(place) {
                first[2] &= p0;
                first[3] &= p1;
                continue;
            }
        }
        let [i0, i1, i2, i3] = id.to_le_bytes();
        kept.push([t0, t1, p0, p1, i0, i1, i2, i3]);
    }
    let changed = [&VERSION[..], kept.as_flattened()].concat();
    if changed == value { Cow::Borrowed(value) } else { Cow::Owned(changed) }
}

#[cfg(test)]
mod tests {
    use kernel::process::IdRange;

    use super::*;

    fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        entries.iter().fold(VERSION.to_vec(), |acl, (tag, permissions, id)| {
            [&acl[..], &tag.to_le_bytes(), &permissions.to_le_bytes(), &id.to_le_bytes()].concat()
        })
    }

    #[test]
    fn ids_that_a_namespace_lacks_become_those_of_owners() {
        const NONE: u32 = u32::MAX;
        let ids = |count| {
            let range = || vec![IdRange { inside: 0, outside: 1000, count }];
            OwnIds::from_ranges(range(), range())
        };
        let given = acl(&[
            (1, 6, NONE),
            (USER, 6, 33),
            (USER, 5, 70_000),
            (USER, 4, 70_001),
            (4, 4, NONE),
            (GROUP, 7, 70_000),
            (16, 7, NONE),
            (32, 0, NONE),
        ]);
        let nobody = acl(&[
            (1, 6, NONE),
            (USER, 6, 33),
            (USER, 4, 65_534),
            (4, 4, NONE),
            (GROUP, 7, 65_534),
            (16, 7, NONE),
            (32, 0, NONE),
        ]);
        let root = acl(&[
            (1, 6, NONE),
            (USER, 4, 0),
            (4, 4, NONE),
            (GROUP, 7, 0),
            (16, 7, NONE),
            (32, 0, NONE),
        ]);
        for name in [&b"system.posix_acl_access"[..], b"system.posix_acl_default"] {
            assert_eq!(*acl_for_ids(name, &given, &ids(65_536)), *nobody);
            assert_eq!(*acl_for_ids(name, &given, &ids(1)), *root);
            assert!(matches!(acl_for_ids(name, &given, &ids(100_000)), Cow::Borrowed(_)));
        }
        assert_eq!(*acl_for_ids(b"user.x", &given, &ids(1)), *given);
        // This is the maximum number of entries of an xattr. Half of their ids are in the namespace.
        let entries: Vec<_> = (0..8191).map(|it| (USER, 7, 65_000 + it)).collect();
        let kept: Vec<_> = (65_000..65_536).map(|it| (USER, 7, it)).collect();
        let found =
            acl_for_ids(b"system.posix_acl_access", &acl(&entries), &ids(65_536)).into_owned();
        assert_eq!(found, acl(&kept));
        // A value that the kernel refuses is unchanged.
        for odd in [&given[..given.len() - 1], &given[1..], b""] {
            assert_eq!(*acl_for_ids(b"system.posix_acl_access", odd, &ids(1)), *odd);
        }
    }
}
