//! The user of the command. Names are resolved with the image's own `/etc/passwd` and `/etc/group`.

use std::os::fd::BorrowedFd;

use store::OperationError;

use crate::bundle::files::read_small;

/// Largest id that runtimes accept unchanged. crun treats 4294967295, the kernel's value for "no change", as root.
/// Docker has the same limit. Source: runc, `user.go`, `maxID`.
const LARGEST_ID: u32 = 0x7fff_ffff;

/// Ids of the process. Source: OCI runtime-spec 1.2, `config.md`, "User".
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups, in ascending order, without `gid`.
    pub groups: Vec<u32>,
    /// Home directory; `/` if the user has none.
    pub home: String,
}

/// Reason why the image's files do not provide the user.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UserError {
    /// The name is not in `/etc/passwd`.
    #[error("the image has no user \"{0}\" in /etc/passwd")]
    NoUser(String),
    /// The name is not in `/etc/group`.
    #[error("the image has no group \"{0}\" in /etc/group")]
    NoGroup(String),
    /// The kernel or a runtime may misinterpret the id.
    #[error("{0} is not a user or group number: the largest is {LARGEST_ID}")]
    Range(u32),
}

/// Error of a user that cannot be found.
#[derive(Debug, thiserror::Error)]
pub enum UserLookupError {
    /// One of the two files cannot be read.
    #[error(transparent)]
    File(#[from] OperationError),
    /// The two files do not provide the user.
    #[error(transparent)]
    User(#[from] UserError),
}

/// Finds the user named by `spec` in the two files of the root file system `root`; see [`resolve`].
pub fn find_user(root: BorrowedFd<'_>, spec: &str) -> Result<User, UserLookupError> {
    let passwd = read_small(root, "etc/passwd")?;
    let group = read_small(root, "etc/group")?;
    Ok(resolve(spec, &passwd, &group)?)
}

/// Adds groups, by names of the root file system `root` or by numbers, to those of a user.
///
/// # Errors
/// [`UserLookupError`] for a name that is not in `/etc/group`, and for a number above 2^31-1.
pub fn add_groups(
    root: BorrowedFd<'_>,
    user: &mut User,
    names: &[String],
) -> Result<(), UserLookupError> {
    if names.is_empty() {
        return Ok(());
    }
    let group = read_small(root, "etc/group")?;
    Ok(user.add(names, &group)?)
}

impl User {
    fn add(&mut self, names: &[String], group: &[u8]) -> Result<(), UserError> {
        for name in names {
            match find_group(name, group)? {
                gid if gid > LARGEST_ID => return Err(UserError::Range(gid)),
                gid if gid != self.gid => self.groups.push(gid),
                _ => {}
            }
        }
        self.groups.sort_unstable();
        self.groups.dedup();
        Ok(())
    }
}

/// Finds the user named by `spec`: `user`, `uid`, `user:group`, `uid:gid` and mixtures; empty means root. Without a
/// group, the user gets the primary group and all groups that list the user. A uid that is not in `/etc/passwd` is
/// used as it is, with group 0. Malformed lines of the two files are skipped, as in the C library.
///
/// # Errors
/// [`UserError`] for an unknown name, and for any id above 2^31-1, including ids from the two files.
pub fn resolve(spec: &str, passwd: &[u8], group: &[u8]) -> Result<User, UserError> {
    let (user, wanted_group) = match spec.split_once(':') {
        Some((user, group)) => (user, Some(group).filter(|group| !group.is_empty())),
        None => (spec, None),
    };
    let user = if user.is_empty() { "0" } else { user };
    let accounts = || passwd.split(|&byte| byte == b'\n').filter_map(Account::parse);
    // Names take precedence over numbers, because a user may be called 1000.
    let account = accounts().find(|it| it.name == user.as_bytes()).or_else(|| {
        let uid: u32 = user.parse().ok()?;
        accounts().find(|it| it.uid == uid)
    });
    let (uid, own_gid, name, home) = match (&account, user.parse::<u32>()) {
        (Some(it), _) => (it.uid, it.gid, it.name, it.home),
        (None, Ok(uid)) => (uid, 0, &b""[..], &b"/"[..]),
        (None, Err(_)) => return Err(UserError::NoUser(user.to_owned())),
    };
    let mut groups = Vec::new();
    let gid = match wanted_group {
        Some(wanted) => find_group(wanted, group)?,
        None => {
            let lines = group.split(|&byte| byte == b'\n').filter_map(Group::parse);
            groups.extend(lines.filter(|it| it.has_member(name)).map(|it| it.gid));
            groups.retain(|gid| *gid != own_gid);
            groups.sort_unstable();
            groups.dedup();
            own_gid
        }
    };
    let home = match home {
        b"" => "/".to_owned(),
        home => String::from_utf8_lossy(home).into_owned(),
    };
    match [uid, gid].iter().chain(&groups).find(|&&id| id > LARGEST_ID) {
        Some(id) => Err(UserError::Range(*id)),
        None => Ok(User { uid, gid, groups, home }),
    }
}

fn find_group(wanted: &str, group: &[u8]) -> Result<u32, UserError> {
    let lines = group.split(|&byte| byte == b'\n').filter_map(Group::parse);
    let by_name = lines.into_iter().find(|it| it.name == wanted.as_bytes()).map(|it| it.gid);
    let gid = by_name.or_else(|| wanted.parse().ok());
    gid.ok_or_else(|| UserError::NoGroup(wanted.to_owned()))
}

/// A line of passwd(5).
struct Account<'a> {
    name: &'a [u8],
    uid: u32,
    gid: u32,
    home: &'a [u8],
}

impl<'a> Account<'a> {
    fn parse(line: &'a [u8]) -> Option<Self> {
        let mut fields = line.split(|&byte| byte == b':');
        let (name, _password) = (fields.next()?, fields.next()?);
        let (uid, gid) = (number(fields.next()?)?, number(fields.next()?)?);
        let (_comment, home) = (fields.next()?, fields.next()?);
        (!name.is_empty()).then_some(Self { name, uid, gid, home })
    }
}

/// A line of group(5).
struct Group<'a> {
    name: &'a [u8],
    gid: u32,
    members: &'a [u8],
}

impl<'a> Group<'a> {
    fn parse(line: &'a [u8]) -> Option<Self> {
        let mut fields = line.split(|&byte| byte == b':');
        let (name, _password, gid) = (fields.next()?, fields.next()?, number(fields.next()?)?);
        let members = fields.next().unwrap_or_default();
        (!name.is_empty()).then_some(Self { name, gid, members })
    }

    fn has_member(&self, user: &[u8]) -> bool {
        !user.is_empty() && self.members.split(|&byte| byte == b',').any(|name| name == user)
    }
}

fn number(field: &[u8]) -> Option<u32> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &[u8] = b"root:x:0:0:root:/root:/bin/sh\nbroken\nwww:x:33:34::/srv:/bin/false\n\
        1000:x:7:8:::\napp:x:4294967295:5:::\nbig:x:6:2147483648:::\nlast:x:2147483647:2147483647:::\n";
    const GROUP: &[u8] = b"root:x:0:\nwww:x:34:\nadm:x:4:www,root\nlog:x:3:www\nx\nown:x:34:www\n\
        none:x:4294967295:last\n";

    fn check(spec: &str, expect: Result<(u32, u32, &[u32], &str), UserError>) {
        let expect = expect.map(|(uid, gid, groups, home)| User {
            uid,
            gid,
            groups: groups.to_vec(),
            home: home.to_owned(),
        });
        assert_eq!(resolve(spec, PASSWD, GROUP), expect, "{spec}");
    }

    #[test]
    fn users_are_found_as_other_tools_find_them() {
        check("", Ok((0, 0, &[4], "/root")));
        check("www", Ok((33, 34, &[3, 4], "/srv")));
        check("33", Ok((33, 34, &[3, 4], "/srv")));
        check("www:adm", Ok((33, 4, &[], "/srv")));
        check("www:99", Ok((33, 99, &[], "/srv")));
        check("www:", Ok((33, 34, &[3, 4], "/srv")));
        check(":adm", Ok((0, 4, &[], "/root")));
        check("4242", Ok((4242, 0, &[], "/")));
        check("4242:17", Ok((4242, 17, &[], "/")));
        check("1000", Ok((7, 8, &[], "/")));
        check("nobody", Err(UserError::NoUser("nobody".to_owned())));
        check("www:nowhere", Err(UserError::NoGroup("nowhere".to_owned())));
        check("-1", Err(UserError::NoUser("-1".to_owned())));
        // Runtimes treat these ids as root.
        check("4294967295", Err(UserError::Range(u32::MAX)));
        check("app", Err(UserError::Range(u32::MAX)));
        check("app:0", Err(UserError::Range(u32::MAX)));
        check("big", Err(UserError::Range(1 << 31)));
        check("1000:4294967295", Err(UserError::Range(u32::MAX)));
        check("1000:2147483648", Err(UserError::Range(1 << 31)));
        check("www:none", Err(UserError::Range(u32::MAX)));
        check("last", Err(UserError::Range(u32::MAX)));
        check("last:2147483647", Ok((0x7fff_ffff, 0x7fff_ffff, &[], "/")));
        check("4294967296", Err(UserError::NoUser("4294967296".to_owned())));
    }

    #[test]
    fn groups_are_added_by_name_or_number() {
        let check = |names: &[&str], expect: Result<&[u32], UserError>| {
            let mut user = resolve("www", PASSWD, GROUP).unwrap();
            let names: Vec<_> = names.iter().map(|&it| it.to_owned()).collect();
            let added = user.add(&names, GROUP).map(|()| user.groups);
            assert_eq!(added, expect.map(<[u32]>::to_vec), "{names:?}");
        };
        check(&[], Ok(&[3, 4]));
        check(&["99", "root", "adm", "www"], Ok(&[0, 3, 4, 99]));
        check(&["nowhere"], Err(UserError::NoGroup("nowhere".to_owned())));
        check(&["-1"], Err(UserError::NoGroup("-1".to_owned())));
        check(&["2147483648"], Err(UserError::Range(1 << 31)));
        check(&["none"], Err(UserError::Range(u32::MAX)));
    }
}
