//! Maps owners from the host's ids back to the container's ids.

use kernel::process::IdRange;

use crate::bundle::spec::{IdMapping, SpecLinux};
use crate::bundle::userns::{IdMap, inside};

/// A map from the host's user and group ids to a container's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Owners {
    /// `None` if both are the same.
    users: Option<Vec<IdRange>>,
    groups: Option<Vec<IdRange>>,
}

/// An id of the host that the container's map lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{kind} {id} of the host is not in the container's map of ids")]
pub struct Unmapped {
    /// `user` or `group`.
    kind: &'static str,
    id: u32,
}

impl Owners {
    /// Returns the map of a container, from its bundle.
    #[must_use]
    pub fn of_bundle(linux: &SpecLinux) -> Self {
        let range =
            |it: &IdMapping| IdRange { inside: it.container, outside: it.host, count: it.size };
        let ranges =
            |ranges: &[IdMapping]| (!ranges.is_empty()).then(|| ranges.iter().map(range).collect());
        Self { users: ranges(&linux.uid_mappings), groups: ranges(&linux.gid_mappings) }
    }

    /// Returns the map of a root.
    #[must_use]
    pub fn of_map(map: &IdMap) -> Self {
        Self { users: Some(map.users().to_vec()), groups: Some(map.groups().to_vec()) }
    }

    /// Returns the container's id of a user of the host.
    pub fn user(&self, host: u32) -> Result<u32, Unmapped> {
        map_host_id(self.users.as_deref(), host).ok_or(Unmapped { kind: "user", id: host })
    }

    /// Returns the container's id of a group of the host.
    pub fn group(&self, host: u32) -> Result<u32, Unmapped> {
        map_host_id(self.groups.as_deref(), host).ok_or(Unmapped { kind: "group", id: host })
    }

    /// Returns the value of an xattr as the container would read it: ACLs and file capabilities contain ids.
    pub fn xattr(&self, name: &[u8], value: Vec<u8>) -> Result<Vec<u8>, Unmapped> {
        match name {
            b"system.posix_acl_access" | b"system.posix_acl_default" => self.acl(value),
            b"security.capability" => self.capability(value),
            _ => Ok(value),
        }
    }

    /// Maps the ids in an ACL. Source: Linux `linux/posix_acl_xattr.h`: a version of 4 bytes, then entries of tag,
    /// permissions and id.
    fn acl(&self, mut value: Vec<u8>) -> Result<Vec<u8>, Unmapped> {
        const HEADER: usize = 4;
        const USER: u16 = 0x02;
        const GROUP: u16 = 0x08;
        for entry in value.get_mut(HEADER..).unwrap_or_default().as_chunks_mut::<8>().0 {
            let [tag, tag_high, _, _, id @ ..] = *entry;
            let id = u32::from_le_bytes(id);
            let mapped = match u16::from_le_bytes([tag, tag_high]) {
                USER => self.user(id)?,
                GROUP => self.group(id)?,
                _ => continue,
            };
            entry[4..].copy_from_slice(&mapped.to_le_bytes());
        }
        Ok(value)
    }

    /// Maps the id in a file capability. Source: Linux `linux/capability.h`, `struct vfs_ns_cap_data`: version 3
    /// extends version 2 by a host's user id, which is root in the namespace in which the capabilities apply.
    fn capability(&self, value: Vec<u8>) -> Result<Vec<u8>, Unmapped> {
        const REVISION_MASK: u32 = 0xff00_0000;
        const REVISION_2: u32 = 0x0200_0000;
        const REVISION_3: u32 = 0x0300_0000;
        let Ok(bytes) = <[u8; 24]>::try_from(&value[..]) else { return Ok(value) };
        let ([magic @ .., _, _, _, _], root) = (&bytes, [20, 21, 22, 23].map(|at| bytes[at]));
        let magic = u32::from_le_bytes([magic[0], magic[1], magic[2], magic[3]]);
        if self.users.is_none() || magic & REVISION_MASK != REVISION_3 {
            return Ok(value);
        }
        let mut value = value;
        match self.user(u32::from_le_bytes(root))? {
            0 => {
                value[..4].copy_from_slice(&((magic & !REVISION_MASK) | REVISION_2).to_le_bytes());
                value.truncate(20);
            }
            root => value[20..].copy_from_slice(&root.to_le_bytes()),
        }
        Ok(value)
    }
}

fn map_host_id(ranges: Option<&[IdRange]>, host: u32) -> Option<u32> {
    ranges.map_or(Some(host), |ranges| inside(ranges, host))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn map() -> Owners {
        let linux = json!({
            "uidMappings": [
                {"containerID": 0, "hostID": 100_000, "size": 1000},
                {"containerID": 1000, "hostID": 7, "size": 1},
            ],
            "gidMappings": [{"containerID": 0, "hostID": 200_000, "size": 65536}],
        });
        Owners::of_bundle(&serde_json::from_value(linux).unwrap())
    }

    #[test]
    fn owners() {
        let map = map();
        for (host, expect) in
            [(100_000, Some(0)), (100_999, Some(999)), (7, Some(1000)), (8, None), (0, None)]
        {
            assert_eq!(map.user(host).ok(), expect, "{host}");
        }
        assert_eq!(map.user(101_000).unwrap_err().to_string(), {
            "user 101000 of the host is not in the container's map of ids"
        });
        assert_eq!(map.group(265_535), Ok(65535));
        assert_eq!(map.group(265_536), Err(Unmapped { kind: "group", id: 265_536 }));
        let same = Owners::of_bundle(&SpecLinux::default());
        assert_eq!((same.user(5), same.group(u32::MAX - 1)), (Ok(5), Ok(u32::MAX - 1)));
    }

    /// Returns the bytes that `setfacl -m u:UID:rw,g:GID:r` writes. Source: Linux `linux/posix_acl_xattr.h`.
    fn acl(user: u32, group: u32) -> Vec<u8> {
        let entry = |tag: u16, bits: u16, id: u32| {
            [&tag.to_le_bytes()[..], &bits.to_le_bytes(), &id.to_le_bytes()].concat()
        };
        let entries = [
            entry(1, 6, u32::MAX),
            entry(2, 6, user),
            entry(4, 4, u32::MAX),
            entry(8, 4, group),
            entry(0x10, 6, u32::MAX),
            entry(0x20, 4, u32::MAX),
        ];
        [&2_u32.to_le_bytes()[..], &entries.concat()].concat()
    }

    #[test]
    fn acls() {
        let name = b"system.posix_acl_access";
        assert_eq!(map().xattr(name, acl(100_005, 200_006)), Ok(acl(5, 6)));
        assert_eq!(map().xattr(name, acl(5, 200_006)), Err(Unmapped { kind: "user", id: 5 }));
        assert_eq!(map().xattr(b"user.acl", acl(5, 6)), Ok(acl(5, 6)));
        // A truncated value is unchanged.
        assert_eq!(map().xattr(name, vec![2, 0, 0]), Ok(vec![2, 0, 0]));
    }

    #[test]
    fn capabilities() {
        let name = b"security.capability";
        let third = |root: u32| {
            let mut bytes = vec![1, 0, 0, 3, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
            bytes.extend_from_slice(&root.to_le_bytes());
            bytes
        };
        let second = vec![1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(map().xattr(name, third(100_000)), Ok(second.clone()));
        assert_eq!(map().xattr(name, third(7)), Ok(third(1000)));
        assert!(map().xattr(name, third(3)).is_err());
        assert_eq!(map().xattr(name, second.clone()), Ok(second));
        assert_eq!(Owners::default().xattr(name, third(3)), Ok(third(3)));
    }
}
