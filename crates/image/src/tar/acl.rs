//! Converts POSIX ACLs between the text in a tar and the bytes of the kernel's xattrs.
#![warn(clippy::arithmetic_side_effects, clippy::as_conversions, clippy::indexing_slicing)]

use super::error::TarCorruption;

/// Version of the xattr's format. Source: Linux `linux/posix_acl_xattr.h`, `POSIX_ACL_XATTR_VERSION`.
const VERSION: u32 = 2;
/// The id of entries without an id. Source: Linux `linux/posix_acl.h`, `ACL_UNDEFINED_ID`.
const NO_ID: u32 = u32::MAX;

/// The subject of an entry, in the order that the kernel requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Tag {
    Owner,
    User,
    OwningGroup,
    Group,
    Mask,
    Other,
}

impl Tag {
    /// Returns the kernel's number. Source: Linux `linux/posix_acl.h`, `ACL_USER_OBJ` and so on.
    const fn number(self) -> u16 {
        match self {
            Self::Owner => 0x01,
            Self::User => 0x02,
            Self::OwningGroup => 0x04,
            Self::Group => 0x08,
            Self::Mask => 0x10,
            Self::Other => 0x20,
        }
    }

    fn with_number(number: u16) -> Option<Self> {
        use Tag::{Group, Mask, Other, Owner, OwningGroup, User};
        [Owner, User, OwningGroup, Group, Mask, Other].into_iter().find(|it| it.number() == number)
    }
}

/// The reason why an ACL cannot be converted to its binary form.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum AclError {
    Corrupt(TarCorruption),
    /// This line has a name without a number, as GNU tar writes it.
    Name(Vec<u8>),
}

/// Converts an ACL from text to the value of `system.posix_acl_access` or `_default`. Returns `None` if the ACL
/// states no more than the file's mode and `keep_minimal` is false, because the kernel would then store no ACL.
///
/// Entries are separated by commas or newlines, as star and libarchive or GNU tar write them; `#` begins a comment. A
/// user or group may be a number, or a name with the number in a fourth field. A name without a number has no meaning
/// on other systems.
pub(super) fn binary(text: &[u8], keep_minimal: bool) -> Result<Option<Vec<u8>>, AclError> {
    let mut entries = Vec::new();
    for line in text.split(|byte| matches!(byte, b'\n' | b',')) {
        let line = line.split(|&byte| byte == b'#').next().unwrap_or_default().trim_ascii();
        if line.is_empty() {
            continue;
        }
        entries.push(parse(line)?);
    }
    if entries.is_empty() {
        return Ok(None);
    }
    entries.sort_unstable_by_key(|&(tag, id, _)| (tag, id));
    let twins = entries.iter().zip(entries.iter().skip(1)).any(|(a, b)| (a.0, a.1) == (b.0, b.1));
    let twins = twins.then_some("it names a user or group twice");
    if let Some(reason) = miscounted(&entries).or(twins) {
        return Err(AclError::Corrupt(TarCorruption::Acl { text: excerpt(text).to_vec(), reason }));
    }
    if entries.len() == 3 && !keep_minimal {
        return Ok(None);
    }
    let mut value = VERSION.to_le_bytes().to_vec();
    for (tag, id, permissions) in entries {
        value.extend_from_slice(&tag.number().to_le_bytes());
        value.extend_from_slice(&permissions.to_le_bytes());
        value.extend_from_slice(&id.to_le_bytes());
    }
    Ok(Some(value))
}

/// Converts an xattr's value to text, as libarchive and GNU tar write it if names are unknown. Returns `None` for a
/// value that the kernel would not store.
pub(super) fn text(value: &[u8]) -> Option<Vec<u8>> {
    let entries = value.strip_prefix(&VERSION.to_le_bytes())?;
    let mut text = Vec::new();
    for entry in entries.chunks(8) {
        let [tag, tag_high, bits, bits_high, id @ ..] = *entry.first_chunk::<8>()?;
        let id = u32::from_le_bytes(id);
        let who = match u16::from_le_bytes([tag, tag_high]) {
            0x01 => "user:".to_owned(),
            0x02 => format!("user:{id}"),
            0x04 => "group:".to_owned(),
            0x08 => format!("group:{id}"),
            0x10 => "mask:".to_owned(),
            0x20 => "other:".to_owned(),
            _ => return None,
        };
        let bits = u16::from_le_bytes([bits, bits_high]);
        let letter = |bit: u16, letter| if bits & bit == 0 { '-' } else { letter };
        let comma = if text.is_empty() { "" } else { "," };
        let entry = format!("{comma}{who}:{}{}{}", letter(4, 'r'), letter(2, 'w'), letter(1, 'x'));
        text.extend_from_slice(entry.as_bytes());
    }
    Some(text)
}

/// Returns the start of a value, for an error message.
fn excerpt(text: &[u8]) -> &[u8] {
    text.get(..100).unwrap_or(text)
}

/// Checks a value of `system.posix_acl_access` or `_default` as setxattr(2) does. A value without entries is valid,
/// because it removes the ACL. Source: Linux `fs/posix_acl.c`, `posix_acl_from_xattr` and `posix_acl_valid`.
///
/// A value of another size or version must not get into an image: for such a file, all users except the owner get an
/// error of the kernel when they open the file or access the directory.
pub(super) fn check_value(value: &[u8]) -> Result<(), TarCorruption> {
    let wrong = |reason| TarCorruption::Acl { text: excerpt(value).to_vec(), reason };
    if value.is_empty() {
        return Ok(());
    }
    let Some((version, entries)) = value.split_first_chunk::<4>() else {
        return Err(wrong("it is shorter than an ACL's version"));
    };
    if u32::from_le_bytes(*version) != VERSION {
        return Err(wrong("its version is not 2"));
    }
    let (entries, rest) = entries.as_chunks::<8>();
    if !rest.is_empty() {
        return Err(wrong("its last entry is cut short"));
    }
    if entries.is_empty() {
        return Ok(());
    }
    let entries = entries.iter().map(|entry| {
        let [tag, tag_high, bits, bits_high, id @ ..] = *entry;
        let tag =
            Tag::with_number(u16::from_le_bytes([tag, tag_high])).ok_or("a tag is unknown")?;
        let bits = u16::from_le_bytes([bits, bits_high]);
        let id = u32::from_le_bytes(id);
        match tag {
            _ if bits > 7 => Err("an entry has unknown permissions"),
            Tag::User | Tag::Group if id == NO_ID => Err("an entry has no user or group"),
            _ => Ok((tag, id, bits)),
        }
    });
    let entries = entries.collect::<Result<Vec<_>, _>>().map_err(wrong)?;
    if !entries.is_sorted_by_key(|entry| entry.0) {
        return Err(wrong("its entries are not in the order of their tags"));
    }
    miscounted(&entries).map_or(Ok(()), |reason| Err(wrong(reason)))
}

/// Returns the reason why the kernel would refuse the number of entries. Source: Linux `fs/posix_acl.c`,
/// `posix_acl_valid`.
fn miscounted(entries: &[(Tag, u32, u16)]) -> Option<&'static str> {
    let count = |wanted: Tag| entries.iter().filter(|entry| entry.0 == wanted).count();
    let has_names = entries.iter().any(|entry| matches!(entry.0, Tag::User | Tag::Group));
    if count(Tag::Owner) != 1 || count(Tag::OwningGroup) != 1 || count(Tag::Other) != 1 {
        return Some("it does not have one entry each for owner, owning group and others");
    }
    if count(Tag::Mask) > 1 || has_names && count(Tag::Mask) == 0 {
        return Some("it does not have exactly one mask");
    }
    None
}

fn parse(line: &[u8]) -> Result<(Tag, u32, u16), AclError> {
    let wrong =
        |reason| AclError::Corrupt(TarCorruption::Acl { text: excerpt(line).to_vec(), reason });
    let mut fields = line.split(|&byte| byte == b':').map(<[u8]>::trim_ascii);
    let mut kind = fields.next().unwrap_or_default();
    // Some writers repeat `default`, which the record's key already states.
    if matches!(kind, b"default" | b"d") {
        kind = fields.next().unwrap_or_default();
    }
    let first = fields.next().ok_or_else(|| wrong("it ends after the type"))?;
    let second = fields.next();
    let number = fields.next();
    let (name, permissions) = match (kind, second) {
        (_, Some(second)) => (first, second),
        // Solaris writes `mask:rwx` and `other:rwx`.
        (b"mask" | b"m" | b"other" | b"o", None) => (&b""[..], first),
        _ => return Err(wrong("it has no permissions")),
    };
    let tag = match (kind, name) {
        (b"user" | b"u", b"") => Tag::Owner,
        (b"user" | b"u", _) => Tag::User,
        (b"group" | b"g", b"") => Tag::OwningGroup,
        (b"group" | b"g", _) => Tag::Group,
        (b"mask" | b"m", b"") => Tag::Mask,
        (b"other" | b"o", b"") => Tag::Other,
        _ => return Err(wrong("its type is unknown")),
    };
    let id = match tag {
        Tag::User | Tag::Group => number
            .and_then(decimal)
            .or_else(|| decimal(name))
            .ok_or_else(|| AclError::Name(excerpt(line).to_vec()))?,
        _ => NO_ID,
    };
    let mut bits = 0;
    for letter in permissions {
        bits |= match letter {
            b'r' => 4,
            b'w' => 2,
            b'x' => 1,
            b'-' => 0,
            _ => return Err(wrong("its permissions have letters other than r, w, x and -")),
        };
    }
    Ok((tag, id, bits))
}

fn decimal(digits: &[u8]) -> Option<u32> {
    let id: u32 = std::str::from_utf8(digits).ok()?.parse().ok()?;
    (digits.iter().all(u8::is_ascii_digit) && id != NO_ID).then_some(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Expected values are from `getfattr -e hex -n system.posix_acl_access` on ext4 after `setfacl`.
    const USER_1001: &str = concat!(
        "02000000",
        "01000600ffffffff",
        "02000600e9030000",
        "04000400ffffffff",
        "10000600ffffffff",
        "20000400ffffffff"
    );

    #[track_caller]
    fn check(text: &str, expected: Option<&str>) {
        let value = binary(text.as_bytes(), false).unwrap();
        assert_eq!(value.as_deref().map(hex).as_deref(), expected, "{text}");
    }

    #[track_caller]
    fn check_refused(text: &str, expected: &str) {
        let error = match binary(text.as_bytes(), false).unwrap_err() {
            AclError::Corrupt(error) => error.to_string(),
            AclError::Name(line) => format!("no number in {}", line.escape_ascii()),
        };
        assert!(error.contains(expected), "{text}: {error}");
    }

    #[test]
    fn texts() {
        // star, GNU tar, libarchive, libarchive with a number after the name, abbreviations, Solaris.
        check("user::rw-,user:1001:rw-,group::r--,mask::rw-,other::r--", Some(USER_1001));
        check("user::rw-\nuser:1001:rw-\ngroup::r--\nmask::rw-\nother::r--\n", Some(USER_1001));
        check("user::rw-,group::r--,other::r--,user:1001:rw-,mask::rw-", Some(USER_1001));
        check("user::rw-,group::r--,other::r--,user:joe:rw-:1001,mask::rw-", Some(USER_1001));
        check("u::rw, g::r,o:r,m:rw,u:1001:rw", Some(USER_1001));
        check(
            "default:user::rw-\ndefault:user:1001:rw-\t#effective:r--\nd:group::r--\n\
             # a comment\nd:mask::rw-\nd:other::r--\n",
            Some(USER_1001),
        );
        check("", None);
        check("user::rwx,group::r-x,other::r-x", None);
    }

    /// A minimal default ACL differs from no ACL.
    #[test]
    fn minimal_default() {
        let value = binary(b"user::rwx,group::r-x,other::r-x", true).unwrap().unwrap();
        assert_eq!(hex(&value), "0200000001000700ffffffff04000500ffffffff20000500ffffffff");
    }

    #[test]
    fn refused() {
        check_refused("user::rw-,group::r--", "one entry each");
        check_refused("user::rw-,user::rw-,group::r--,other::r--", "one entry each");
        check_refused("user::rw-,group::r--,other::r--,user:1:r", "exactly one mask");
        check_refused("user::rw-,group::r--,other::r--,mask::r,mask::r", "exactly one mask");
        check_refused("user::rw-,group::r--,other::r--,mask::r,user:1:r,user:01:w", "twice");
        check_refused(
            "user::rw-,user:joe:rw-,group::r--,mask::rw-,other::r--",
            "no number in user:joe:rw-",
        );
        check_refused("user:4294967295:rw-", "no number in user:");
        check_refused("user:+1:rw-", "no number in user:");
        check_refused("user", "ends after the type");
        check_refused("user:rw-", "no permissions");
        check_refused("owner@:rw-:allow", "its type is unknown");
        check_refused("user::rwz", "letters");
    }

    /// The expected results are those of setxattr(2) on ext4: 0, EINVAL, and EOPNOTSUPP for another version.
    #[test]
    fn values() {
        let value = |entries: &[(u16, u16, u32)]| {
            let mut value = vec![2, 0, 0, 0];
            for (tag, bits, id) in entries {
                value.extend([&tag.to_le_bytes()[..], &bits.to_le_bytes()].concat());
                value.extend(id.to_le_bytes());
            }
            value
        };
        let fine = |value: &[u8]| assert_eq!(check_value(value), Ok(()), "{value:?}");
        let wrong = |value: &[u8], expected: &str| {
            let error = check_value(value).unwrap_err().to_string();
            assert!(error.ends_with(expected), "{value:?}: {error}");
        };
        let (owner, group, other) = ((1, 6, NO_ID), (4, 4, NO_ID), (32, 4, NO_ID));
        let (user, mask) = ((2, 7, 1001), (16, 7, NO_ID));
        fine(&value(&[owner, group, other]));
        fine(&value(&[owner, user, group, mask, other]));
        fine(&value(&[(1, 6, 5), group, other]));
        fine(&value(&[owner, user, (2, 1, 1001), (2, 1, 7), group, mask, other]));
        fine(&value(&[]));
        fine(b"");
        wrong(b"\x02\0\0", "it is shorter than an ACL's version");
        wrong(b"\x03\0\0\0", "its version is not 2");
        wrong(b"\0\0\0\x02", "its version is not 2");
        wrong(&value(&[owner, group, other])[..27], "its last entry is cut short");
        wrong(&value(&[owner, group, (64, 4, NO_ID)]), "a tag is unknown");
        wrong(&value(&[(1, 8, NO_ID), group, other]), "an entry has unknown permissions");
        wrong(&value(&[owner, (2, 7, NO_ID), group, mask, other]), "has no user or group");
        wrong(&value(&[owner, other, group]), "not in the order of their tags");
        wrong(&value(&[owner, group]), "one entry each for owner, owning group and others");
        wrong(&value(&[owner, user, group, other]), "it does not have exactly one mask");
    }
}
