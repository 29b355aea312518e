//! The table `[mounts]`: the users for whom `serve --mounts` mounts images, and their limits.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use image::verity::ImageId;
use serve::mounts::{MountLimits, MountPolicy};
use toml::Spanned;
use toml::de::{DeString, DeValue};

use crate::session::accounts::accounts;
use crate::session::system_programs;

/// All keys of the table.
const KEYS: &str = "socket, copies, users, groups, images, image-bytes, inodes, images-per-user, bytes-per-user, \
                    requests-per-second and connections";

/// Default directory of the copies. It must not be on tmpfs, because the kernel cannot mount images from files
/// there.
pub(crate) const COPIES: &str = "/var/cache/quire";

/// The settings in a file for `serve --mounts`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct MountsSettings {
    /// Socket of the service.
    pub(crate) socket: Option<PathBuf>,
    /// Directory for the copies, which are unnamed files.
    pub(crate) copies: Option<PathBuf>,
    /// Users, by name or number.
    users: Option<Vec<String>>,
    /// Groups, by name or number.
    groups: Option<Vec<String>>,
    images: Option<BTreeSet<ImageId>>,
    limits: MountLimits,
}

impl MountsSettings {
    /// Returns the users and groups that may use the service, by number. `lookup` reads `/etc/passwd` and
    /// `/etc/group`. Names that are not in these files are looked up with getent(1).
    pub(crate) fn policy(
        &self,
        lookup: impl Fn(&str) -> std::io::Result<String>,
    ) -> anyhow::Result<MountPolicy> {
        let numbers = |names: &Option<Vec<String>>, file: &str| {
            let Some(names) = names else { return Ok(None) };
            let text = lookup(file).with_context(|| format!("cannot read {file}"))?;
            let database = file.trim_start_matches("/etc/");
            let found = names.iter().map(|name| {
                let known = number(&text, name);
                let known =
                    known.or_else(|| number(&system_programs::getent(database, name)?, name));
                known.with_context(|| format!("\"{name}\" is not in {file}"))
            });
            found.collect::<anyhow::Result<BTreeSet<_>>>().map(Some)
        };
        Ok(MountPolicy {
            users: numbers(&self.users, "/etc/passwd").context("users below [mounts]")?,
            groups: numbers(&self.groups, "/etc/group").context("groups below [mounts]")?,
            images: self.images.clone(),
            limits: self.limits,
        })
    }

    /// Describes the settings for people.
    pub(super) fn told(self) -> [Option<String>; 5] {
        let limits = (self.limits != MountLimits::default()).then(|| {
            let it = self.limits;
            format!(
                "limits: image-bytes {}, inodes {}, images-per-user {}, bytes-per-user {}, requests-per-second {}, \
                 connections {}",
                it.image_bytes, it.inodes, it.images, it.bytes, it.requests, it.connections
            )
        });
        [
            self.socket.map(|it| format!("socket {}", it.display())),
            self.users.map(|it| format!("users {}", it.join(" "))),
            self.groups.map(|it| format!("groups {}", it.join(" "))),
            self.images.map(|it| format!("{} images", it.len())),
            limits,
        ]
    }
}

/// Finds the number of a user or group in the text of such a file.
fn number(text: &str, name: &str) -> Option<u32> {
    if let Ok(number) = name.parse() {
        return Some(number);
    }
    accounts(text).find(|it| it.name == name).map(|it| it.number)
}

pub(super) fn set(
    settings: &mut MountsSettings,
    key: &Spanned<DeString<'_>>,
    value: &Spanned<DeValue<'_>>,
) -> anyhow::Result<()> {
    let value = value.get_ref();
    let path = |key: &str| {
        let path = value.as_str().map(Path::new).filter(|it| it.is_absolute());
        path.map(Path::to_owned)
            .with_context(|| format!("{key} is not an absolute path: write {key} = \"/run/…\""))
    };
    let count = |key: &str| {
        let number = value.as_integer().filter(|it| it.radix() == 10);
        let number = number.and_then(|it| it.as_str().parse::<u64>().ok()).filter(|it| *it > 0);
        number.with_context(|| format!("{key} is not a number above 0: write {key} = 100"))
    };
    let names = |key: &str| {
        let texts = value.as_array().map(|list| {
            let name = |it: &Spanned<DeValue<'_>>| match it.get_ref() {
                DeValue::String(text) => Some(text.to_string()),
                DeValue::Integer(number) => Some(number.as_str().to_owned()),
                _ => None,
            };
            list.iter().map(name).collect::<Option<Vec<_>>>()
        });
        texts
            .flatten()
            .with_context(|| format!("{key} is not a list: write {key} = [\"name\", 1000]"))
    };
    match &key.get_ref()[..] {
        "socket" => settings.socket = Some(path("socket")?),
        "copies" => settings.copies = Some(path("copies")?),
        "users" => settings.users = Some(names("users")?),
        "groups" => settings.groups = Some(names("groups")?),
        "images" => {
            let texts = names("images")?;
            let ids = texts.iter().map(|text| {
                let id = text.parse::<ImageId>();
                id.with_context(|| {
                    format!("images: \"{text}\" is not an image id: see `quire show`")
                })
            });
            settings.images = Some(ids.collect::<anyhow::Result<_>>()?);
        }
        "image-bytes" => settings.limits.image_bytes = count("image-bytes")?,
        "inodes" => settings.limits.inodes = count("inodes")?,
        "images-per-user" => settings.limits.images = count("images-per-user")?,
        "bytes-per-user" => settings.limits.bytes = count("bytes-per-user")?,
        "requests-per-second" => settings.limits.requests = count("requests-per-second")?,
        "connections" => settings.limits.connections = count("connections")?,
        key => bail!("\"{}\" is not a setting of [mounts]: use {KEYS}", key.escape_debug()),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_and_groups_are_found_by_name_or_number() {
        let text = "root:x:0:\nstaff:x:50:a,b\nodd\n";
        for (name, expect) in
            [("staff", Some(50)), ("1000", Some(1000)), ("nobody", None), ("odd", None)]
        {
            assert_eq!(number(text, name), expect, "{name}");
        }
    }

    #[test]
    fn a_policy_without_names_is_for_all() {
        let nothing = |_: &str| -> std::io::Result<String> { panic!("nothing is looked up") };
        let policy = MountsSettings::default().policy(nothing).unwrap();
        assert_eq!(policy, MountPolicy::default());
        let some =
            MountsSettings { users: Some(vec!["x".to_owned()]), ..MountsSettings::default() };
        let error = some.policy(|_| Ok("y:x:1:\n".to_owned())).unwrap_err();
        assert_eq!(format!("{error:#}"), "users below [mounts]: \"x\" is not in /etc/passwd");
    }
}
