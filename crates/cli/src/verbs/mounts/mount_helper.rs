//! `mount.quire`: lets mount(8) and fstab(5) mount images. It translates their arguments to those of `quire mount`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::Path;

/// Name under which mount(8) calls this program.
const NAME: &[u8] = b"mount.quire";

/// Exit code for mount(8) if the image is not mounted. Source: mount(8), "EXIT STATUS".
pub(crate) const FAILED: u8 = 32;
/// Exit code for mount(8) if the arguments are invalid.
pub(crate) const USAGE: u8 = 1;

/// Options of `quire mount` that have the same name in mount(8) and take a value.
const WITH_VALUE: [&str; 10] =
    ["store", "image-store", "policy", "verity", "digest", "domain", "io", "via", "userns", "warm"];
/// Words of `quire mount --options`.
const WORDS: [&str; 7] = ["suid", "nosuid", "dev", "nodev", "exec", "noexec", "ro"];
/// Options that mount(8) handles itself, or that have no effect because images are read-only. Source: mount(8),
/// "FILESYSTEM-INDEPENDENT MOUNT OPTIONS", and fstab(5).
const IGNORED: [&str; 30] = [
    "rw",
    "defaults",
    "auto",
    "noauto",
    "user",
    "nouser",
    "users",
    "owner",
    "group",
    "nofail",
    "_netdev",
    "async",
    "sync",
    "dirsync",
    "atime",
    "noatime",
    "diratime",
    "nodiratime",
    "relatime",
    "norelatime",
    "strictatime",
    "nostrictatime",
    "lazytime",
    "nolazytime",
    "mand",
    "nomand",
    "silent",
    "loud",
    "iversion",
    "noiversion",
];

/// Returns the usage, for the man page.
pub(crate) fn usage() -> String {
    let values = WITH_VALUE.map(|it| format!("{it}=VALUE")).join(", ");
    let words = WORDS.join(", ");
    format!(
        "[-fnsv] [-o OPTION[,OPTION...]] NAME DIRECTORY

mount(8) calls it for `mount -t quire`, and for lines of /etc/fstab with the type quire. It mounts the image NAME \
as quire-mount(1) does.

Options (of -o):
  {values}  As the options of quire-mount(1) with these names.
  {words}  As the words of `quire mount --options`.
  df, replace  As --df and --replace of quire-mount(1).
  writable=KIND, size=SIZE, durable  As `quire mount --writable KIND,size=SIZE,durable`.
  -f  Do nothing.
  -s  Ignore unknown options.
  -v  Log more."
    )
}

/// The request of mount(8).
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum HelperAsk {
    /// Mount with these arguments. The first one is the program's name.
    Mount(Vec<OsString>),
    /// Succeed without mounting (`-f`).
    Pretend,
}

/// Returns the arguments of `quire mount` if mount(8) called this program, else `None`.
pub(crate) fn asked(
    arguments: impl IntoIterator<Item = OsString>,
) -> Option<Result<HelperAsk, String>> {
    let mut arguments = arguments.into_iter();
    let own = arguments.next()?;
    if Path::new(&own).file_name()?.as_bytes() != NAME {
        return None;
    }
    Some(translate(arguments))
}

fn translate(arguments: impl Iterator<Item = OsString>) -> Result<HelperAsk, String> {
    let mut arguments = arguments;
    let mut others = Vec::new();
    let (mut text, mut is_sloppy, mut is_verbose, mut pretends) = (Vec::new(), false, false, false);
    while let Some(argument) = arguments.next() {
        let mut value = |name: char| {
            arguments.next().ok_or_else(|| {
                format!("-{name} needs a value: `mount -t quire -o OPTIONS NAME DIR`")
            })
        };
        match argument.as_bytes() {
            b"-o" => {
                if !text.is_empty() {
                    text.push(b',');
                }
                text.extend(value('o')?.into_vec());
            }
            b"-t" => drop(value('t')?),
            b"-N" => return Err("-N is not supported: use `nsenter --mount` instead".to_owned()),
            [b'-', letters @ ..] if !letters.is_empty() => {
                for letter in letters {
                    match letter {
                        b's' => is_sloppy = true,
                        b'f' => pretends = true,
                        b'n' => {}
                        b'v' => is_verbose = true,
                        _ => return Err(format!("unknown option {}", argument.display())),
                    }
                }
            }
            _ => others.push(argument),
        }
    }
    let Ok([name, directory]) = <[OsString; 2]>::try_from(others) else {
        return Err("give an image and a directory: `mount -t quire NAME DIR`".to_owned());
    };
    let mut words: Vec<OsString> = ["quire", "mount"].map(Into::into).to_vec();
    if is_verbose {
        words.push("--verbose".into());
    }
    words.extend(options(&text, is_sloppy)?);
    // After `--`, the name and the directory may begin with a dash.
    words.extend(["--".into(), name, directory]);
    Ok(if pretends { HelperAsk::Pretend } else { HelperAsk::Mount(words) })
}

/// Translates options of mount(8) to those of `quire mount`.
fn options(text: &[u8], is_sloppy: bool) -> Result<Vec<OsString>, String> {
    let (mut words, mut flags) = (Vec::new(), Vec::new());
    let (mut writable, mut more) = (None, Vec::new());
    for option in text.split(|byte| *byte == b',').filter(|it| !it.is_empty()) {
        let shown = option.escape_ascii().to_string();
        let mut parts = option.splitn(2, |byte| *byte == b'=');
        let key = parts.next().map(String::from_utf8_lossy).unwrap_or_default();
        let value = parts.next();
        let needed = || value.ok_or_else(|| format!("option {key} needs a value: {key}=VALUE"));
        match &*key {
            key if WITH_VALUE.contains(&key) => {
                words.push(format!("--{key}").into());
                words.push(OsStr::from_bytes(needed()?).to_owned());
            }
            key if WORDS.contains(&key) && value.is_none() => flags.push(key.to_owned()),
            "df" => words.push("--df".into()),
            "replace" => words.push("--replace".into()),
            "writable" => writable = Some(needed()?.to_vec()),
            "size" => more.push([b",size=", needed()?].concat()),
            "durable" => more.push(b",durable".to_vec()),
            key if IGNORED.contains(&key) => {}
            key if key.starts_with("x-") || key.starts_with("X-") || key == "comment" => {}
            _ if is_sloppy => {}
            _ => {
                return Err(format!(
                    "unknown option \"{shown}\": use {}, df, replace, writable=KIND, size=SIZE, \
                    durable, or {} of mount(8)",
                    WITH_VALUE.map(|it| format!("{it}=VALUE")).join(", "),
                    WORDS.join(", ")
                ));
            }
        }
    }
    match writable {
        Some(kind) => {
            words.push("--writable".into());
            words.push(OsString::from_vec([kind, more.concat()].concat()));
        }
        None if !more.is_empty() => {
            return Err("size and durable need a writable layer: add writable=KIND".to_owned());
        }
        None => {}
    }
    if !flags.is_empty() {
        words.extend(["--options".into(), flags.join(",").into()]);
    }
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(words: &str, expect: Result<&str, &str>) {
        let arguments = words.split(' ').map(OsString::from);
        let found = asked(arguments).expect("its name").map(|it| match it {
            HelperAsk::Mount(words) => {
                words.iter().map(|it| it.to_string_lossy()).collect::<Vec<_>>().join(" ")
            }
            HelperAsk::Pretend => "nothing".to_owned(),
        });
        match (&found, expect) {
            (Ok(found), Ok(expect)) => assert_eq!(found, expect, "{words}"),
            (Err(found), Err(expect)) => assert!(found.contains(expect), "{words}: {found}"),
            _ => panic!("{words}: {found:?}"),
        }
    }

    #[test]
    fn what_mount_says_becomes_words_of_quire() {
        let own = "/sbin/mount.quire";
        check(&format!("{own} debian /mnt"), Ok("quire mount -- debian /mnt"));
        check(&format!("{own} debian /mnt -o rw"), Ok("quire mount -- debian /mnt"));
        check(
            &format!("{own} debian:12 /mnt -nv -o ro,noexec,user=me,x-systemd.automount,store=/s"),
            Ok("quire mount --verbose --store /s --options ro,noexec -- debian:12 /mnt"),
        );
        check(
            &format!("{own} a /mnt -o rw,writable=memory,size=1G,df -t quire"),
            Ok("quire mount --df --writable memory,size=1G -- a /mnt"),
        );
        check(
            &format!("{own} a /mnt -o writable=dir=/w,durable -o verity=require"),
            Ok("quire mount --verity require --writable dir=/w,durable -- a /mnt"),
        );
        check(&format!("{own} a /mnt -o replace"), Ok("quire mount --replace -- a /mnt"));
        check(&format!("{own} -rf /mnt"), Err("unknown option -rf"));
        check(&format!("{own} -f a /mnt -o ro"), Ok("nothing"));
        check(&format!("{own} a /mnt -o size=1G"), Err("add writable=KIND"));
        check(&format!("{own} a /mnt -o loop"), Err("unknown option \"loop\""));
        check(&format!("{own} a /mnt -s -o loop"), Ok("quire mount -- a /mnt"));
        check(&format!("{own} a /mnt -o store"), Err("store=VALUE"));
        check(&format!("{own} a /mnt -o"), Err("-o needs a value"));
        check(&format!("{own} a"), Err("an image and a directory"));
        check(&format!("{own} a b c"), Err("an image and a directory"));
        check(&format!("{own} a b -N 7"), Err("nsenter"));
        assert_eq!(asked(["quire", "mount"].map(OsString::from)), None);
    }
}
