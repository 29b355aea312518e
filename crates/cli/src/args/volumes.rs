//! `--volume` and `--mount`: mounts in a container besides its root.

use std::num::NonZeroU64;

use anyhow::Context as _;
use container::bundle::Access;
use container::bundle::mounts::{
    MountKind, MountRequest, MountSource, Restrictions, Volume, VolumeError, destination,
};
use kernel::mount::Durability;

use super::ContainerOptions;
use crate::args::writable::bytes;

/// Default permissions of a tmpfs, which are Docker's, and of a filestore.
const ANYBODY: u32 = 0o1777;
const OWNER: u32 = 0o755;

/// A value of `--mount`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MountOption {
    Request(MountRequest),
    /// A volume of the store.
    Volume(Volume),
}

/// Parses a value of `--mount`: `KEY=VALUE,…`, as Docker's `--mount`.
pub(crate) fn mount(text: &str) -> Result<MountOption, String> {
    let (mut kind, mut to, mut source) = (None, None, None);
    let (mut size, mut mode) = (None, None);
    let (mut access, mut durability, mut label) = (None, None, None);
    for word in text.split(',') {
        let (key, value) = word.split_once('=').map_or((word, None), |(a, b)| (a, Some(b)));
        let needed = || value.ok_or_else(|| format!("{key} needs a value: {key}=…"));
        let twice = match key {
            "type" => kind.replace(needed()?).is_some(),
            "dst" | "destination" | "target" => to.replace(needed()?).is_some(),
            "src" | "source" => source.replace(needed()?).is_some(),
            "size" | "tmpfs-size" => size.replace(bytes(needed()?)?).is_some(),
            "mode" | "tmpfs-mode" => mode.replace(permissions(needed()?)?).is_some(),
            "ro" | "readonly" => access.replace(is_said(key, value)?).is_some(),
            "relabel" => label.replace(relabelling(needed()?)?).is_some(),
            "durable" => durability.replace(is_said(key, value)?).is_some(),
            _ => {
                return Err(format!(
                    "there is no key \"{key}\": use type, dst, src, size, mode, ro, durable or relabel"
                ));
            }
        };
        if twice {
            return Err(format!("{key} occurs twice"));
        }
    }
    let to = to.ok_or("dst=PATH, the path in the container, is missing")?;
    let to = destination(to).map_err(|error| error.to_string())?;
    let kinds = "type=memory, type=self, type=volume or type=dir";
    let kind = kind.ok_or_else(|| format!("the type is missing: use {kinds}"))?;
    let (no_source, no_size, no_mode) = (source.is_none(), size.is_none(), mode.is_none());
    let refuse = |is_fine: bool, what: &str| match is_fine {
        true => Ok(()),
        false => Err(format!("type={kind} does not take {what}")),
    };
    let is_of_host = ["dir", "bind"].contains(&kind);
    refuse(label.is_none() || is_of_host, "relabel, because it has no files of the host")?;
    let access = if access == Some(true) { Access::ReadOnly } else { Access::Writable };
    let kind = match kind {
        "volume" => {
            refuse(no_size && no_mode && durability.is_none(), "size, mode and durable")?;
            let source = match source {
                None | Some("") => MountSource::Anonymous(None),
                Some(name) if store::check_id(name).is_ok() => MountSource::Named(name.to_owned()),
                Some(name) => return Err(VolumeError::Name(name.to_owned()).to_string()),
            };
            return Ok(MountOption::Volume(Volume {
                source,
                destination: to,
                access,
                chown: false,
                restrictions: Restrictions::default(),
            }));
        }
        "memory" | "tmpfs" => {
            refuse(no_source, "src, because it has no source on the host")?;
            refuse(durability != Some(true), "durable: use type=self or type=dir")?;
            MountKind::Memory { bytes: size, mode: mode.unwrap_or(ANYBODY), noexec: false }
        }
        "self" => {
            refuse(no_source, "src, because it has no source on the host")?;
            let durability = match durability {
                Some(true) => Durability::Durable,
                _ => Durability::Volatile,
            };
            MountKind::Filestore { bytes: size, mode: mode.unwrap_or(OWNER), durability }
        }
        "dir" | "bind" => {
            refuse(no_size, "size, because the host's file system has a size")?;
            refuse(no_mode, "mode, because the host's directory has a mode")?;
            refuse(
                durability.is_none(),
                "durable, because it is as durable as the host's file system",
            )?;
            match source {
                Some(source) if source.starts_with('/') => MountKind::Host(source.to_owned()),
                Some(source) => return Err(format!("src=\"{source}\" is not an absolute path")),
                None => return Err("type=dir needs src=PATH, a path of the host".to_owned()),
            }
        }
        _ => return Err(format!("there is no type=\"{kind}\": use {kinds}")),
    };
    let relabels = label.is_some();
    Ok(MountOption::Request(MountRequest { kind, destination: to, access, relabels }))
}

/// Parses a value of `--tmpfs`: `PATH[:OPTION,…]`.
///
/// Source of the options and their defaults: podman-run(1), `--tmpfs`.
/// The files of the image are not copied into it, as with Docker.
pub(crate) fn tmpfs(text: &str) -> Result<MountRequest, String> {
    let (to, options) = match text.split_once(':') {
        Some((to, options)) => (to, options),
        None => (text, ""),
    };
    let destination = destination(to).map_err(|error| error.to_string())?;
    let (mut size, mut mode, mut access, mut noexec) = (None, ANYBODY, Access::Writable, true);
    for option in options.split(',').filter(|it| !it.is_empty()) {
        match option.split_once('=') {
            Some(("size", "0")) => size = None,
            Some(("size", value)) => size = Some(bytes(value)?),
            Some(("mode", value)) => mode = permissions(value)?,
            None if option == "rw" => access = Access::Writable,
            None if option == "ro" => access = Access::ReadOnly,
            None if option == "exec" => noexec = false,
            None if option == "noexec" => noexec = true,
            None if ["nosuid", "nodev", "notmpcopyup"].contains(&option) => {}
            _ => {
                return Err(format!(
                    "there is no option \"{option}\": use size=SIZE, mode=MODE, ro, rw, exec or noexec \
                    (nosuid and nodev are always set)"
                ));
            }
        }
    }
    let kind = MountKind::Memory { bytes: size, mode, noexec };
    Ok(MountRequest { kind, destination, access, relabels: false })
}

/// Returns the requested mounts besides volumes.
pub(crate) fn mounts(wanted: &ContainerOptions) -> Vec<MountRequest> {
    let shm = wanted.shm_size.map(|bytes| MountRequest {
        kind: MountKind::Memory { bytes: NonZeroU64::new(bytes), mode: ANYBODY, noexec: true },
        destination: "/dev/shm".to_owned(),
        access: Access::Writable,
        relabels: false,
    });
    let mounts = wanted.mount.iter().filter_map(|it| match it {
        MountOption::Request(request) => Some(request),
        MountOption::Volume(_) => None,
    });
    once(mounts.chain(&wanted.tmpfs).cloned().chain(shm).collect())
}

/// Parses the value of a flag. The value may be missing, or one of Docker's words for yes and no.
fn is_said(key: &str, value: Option<&str>) -> Result<bool, String> {
    match value {
        None | Some("true" | "1") => Ok(true),
        Some("false" | "0") => Ok(false),
        Some(value) => {
            Err(format!("{key}={value}: use {key} without a value, or with true or false"))
        }
    }
}

/// Checks podman's value for relabelling files for SELinux, which Quire ignores. Source: podman-run(1), `--mount`.
fn relabelling(value: &str) -> Result<(), String> {
    match value {
        "shared" | "private" => Ok(()),
        _ => Err(format!("relabel={value}: use shared or private (without effect)")),
    }
}

/// Returns whether a volume or a mount asks for SELinux labels.
pub(crate) fn ask_for_labels(wanted: &ContainerOptions) -> bool {
    let has_option = |text: &String| {
        // Names have no option without a path before it, and a path begins with a slash.
        let options = text.rsplit(':').next().filter(|it| !it.starts_with('/')).unwrap_or_default();
        options.split(',').any(|it| ["z", "Z"].contains(&it))
    };
    wanted.volume.iter().any(has_option) || mounts(wanted).iter().any(|it| it.relabels)
}

fn permissions(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o7777);
    let is_octal = text.bytes().all(|it| it.is_ascii_digit());
    mode.filter(|_| is_octal)
        .ok_or_else(|| format!("mode={text} is not a mode: use octal digits, for example 1777"))
}

/// Parses a value of `--volume`, whose path on the host may begin with a dot, as with podman.
fn volume(text: &str) -> anyhow::Result<Volume> {
    let Some((source, rest)) = text.split_once(':') else { return Ok(text.parse()?) };
    let is_relative =
        [".", ".."].contains(&source) || source.starts_with("./") || source.starts_with("../");
    if !is_relative {
        return Ok(text.parse()?);
    }
    let source = std::path::absolute(source)?;
    let source = source.to_str().context("a path that is not UTF-8, which runtimes need")?;
    Ok(format!("{source}:{rest}").parse()?)
}

/// Parses all values of `--volume`, and adds the volumes of `--mount`.
pub(crate) fn volumes(wanted: &ContainerOptions) -> anyhow::Result<Vec<Volume>> {
    let mounted = wanted.mount.iter().filter_map(|it| match it {
        MountOption::Volume(volume) => Some(Ok(volume.clone())),
        MountOption::Request(_) => None,
    });
    let all = wanted.volume.iter().map(|it| volume(it)).chain(mounted);
    Ok(once(all.collect::<anyhow::Result<_>>()?))
}

/// Removes mounts that the command line repeats, which is no error in podman.
fn once<T: PartialEq>(all: Vec<T>) -> Vec<T> {
    let mut found = Vec::new();
    for one in all {
        if !found.contains(&one) {
            found.push(one);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expect: Result<(MountKind, &str, Access), &str>) {
        match (mount(text), expect) {
            (Ok(found), Ok((kind, destination, access))) => {
                let destination = destination.to_owned();
                let relabels = text.contains("relabel");
                let expect = MountRequest { kind, destination, access, relabels };
                assert_eq!(found, MountOption::Request(expect), "{text}");
            }
            (Err(found), Err(expect)) => assert!(found.contains(expect), "{text}: {found}"),
            (found, expect) => panic!("{text}: {found:?}, not {expect:?}"),
        }
    }

    #[test]
    fn kinds_and_their_words() {
        let (rw, ro) = (Access::Writable, Access::ReadOnly);
        let size = NonZeroU64::new(1 << 20);
        let memory = |bytes, mode| MountKind::Memory { bytes, mode, noexec: false };
        check("type=memory,dst=/a", Ok((memory(None, 0o1777), "/a", rw)));
        check(
            "dst=/a/,type=tmpfs,tmpfs-size=1m,tmpfs-mode=0700",
            Ok((memory(size, 0o700), "/a", rw)),
        );
        check(
            "type=memory,dst=/dev/shm,ro,size=1048576",
            Ok((memory(size, 0o1777), "/dev/shm", ro)),
        );
        let store = |mode, durability| MountKind::Filestore { bytes: size, mode, durability };
        check("type=self,dst=/a,size=1m", Ok((store(0o755, Durability::Volatile), "/a", rw)));
        check(
            "type=self,target=/a,size=1m,durable,mode=2750",
            Ok((store(0o2750, Durability::Durable), "/a", rw)),
        );
        let host = |path: &str| MountKind::Host(path.to_owned());
        check("type=dir,src=/x y,dst=/a", Ok((host("/x y"), "/a", rw)));
        check("type=bind,source=/x,destination=/a,readonly=true", Ok((host("/x"), "/a", ro)));
        check("type=bind,source=/x,destination=/a,readonly=false", Ok((host("/x"), "/a", rw)));
        check("type=bind,src=/x,dst=/a,relabel=shared", Ok((host("/x"), "/a", rw)));
        check("type=dir,src=/x,relabel=private,dst=/a,ro", Ok((host("/x"), "/a", ro)));
    }

    #[test]
    fn volumes_by_mount_are_those_of_volume() {
        for (text, same) in [
            ("type=volume,src=data,dst=/a", "data:/a"),
            ("type=volume,source=data,target=/a,readonly", "data:/a:ro"),
            ("type=volume,dst=/a", "/a"),
        ] {
            assert_eq!(mount(text), Ok(MountOption::Volume(same.parse().unwrap())), "{text}");
        }
    }

    /// Source: podman-run(1), `--tmpfs`.
    #[test]
    fn options_of_tmpfs() {
        let memory = |bytes, mode, noexec, access| {
            let kind = MountKind::Memory { bytes, mode, noexec };
            Ok(MountRequest { kind, destination: "/run".to_owned(), access, relabels: false })
        };
        let (rw, ro) = (Access::Writable, Access::ReadOnly);
        let cases = [
            ("/run", memory(None, 0o1777, true, rw)),
            ("/run/:", memory(None, 0o1777, true, rw)),
            (
                "/run:rw,size=787448k,mode=1770",
                memory(NonZeroU64::new(787_448 << 10), 0o1770, true, rw),
            ),
            ("/run:ro,exec,nosuid,nodev", memory(None, 0o1777, false, ro)),
            ("/run:size=0", memory(None, 0o1777, true, rw)),
        ];
        for (text, expect) in cases {
            assert_eq!(tmpfs(text), expect, "{text}");
        }
        let refused = [
            ("", "is not a path in a container"),
            ("run", "is not a path in a container"),
            ("/proc", "cannot mount on /proc"),
            ("/run:suid", "there is no option \"suid\""),
            ("/run:size=much", "is not a size"),
            ("/run:mode=9", "is not a mode"),
            ("/run:tmpcopyup", "there is no option \"tmpcopyup\""),
        ];
        for (text, expect) in refused {
            let error = tmpfs(text).unwrap_err();
            assert!(error.contains(expect), "{text}: {error}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_the_reason() {
        let cases = [
            ("", "there is no key \"\""),
            ("dst=/a", "use type=memory"),
            ("type=memory", "dst=PATH, the path in the container, is missing"),
            ("type=volumes,dst=/a", "there is no type=\"volumes\""),
            ("type=volume,dst=/a,src=/b", "is not a name of a volume"),
            ("type=volume,dst=/a,size=1", "type=volume does not take size"),
            ("type=memory,dst=a", "is not a path in a container"),
            ("type=memory,dst=/proc", "cannot mount on /proc"),
            ("type=memory,dst=/", "it is the root"),
            ("type=memory,dst=/a/..", "without \"..\""),
            ("type=memory,dst", "dst needs a value"),
            ("type=memory,dst=/a,target=/b", "target occurs twice"),
            ("type=memory,dst=/a,sise=1", "there is no key \"sise\""),
            ("type=memory,dst=/a,size=0", "is not a size"),
            ("type=memory,dst=/a,mode=9", "is not a mode"),
            ("type=memory,dst=/a,mode=+7", "is not a mode"),
            ("type=memory,dst=/a,mode=17777", "is not a mode"),
            ("type=memory,dst=/a,mode=", "is not a mode"),
            ("type=memory,dst=/a,ro=perhaps", "use ro without"),
            ("type=memory,dst=/a,src=/b", "type=memory does not take src"),
            ("type=memory,dst=/a,durable", "does not take durable: use type=self"),
            ("type=self,dst=/a,src=/b", "type=self does not take src"),
            ("type=dir,dst=/a", "type=dir needs src=PATH"),
            ("type=dir,dst=/a,src=b", "\"b\" is not an absolute path"),
            ("type=dir,dst=/a,src=/b,size=1", "type=dir does not take size"),
            ("type=bind,dst=/a,src=/b,mode=1", "type=bind does not take mode"),
            ("type=dir,dst=/a,src=/b,durable", "type=dir does not take durable"),
            ("type=dir,dst=/a,src=/b,relabel", "relabel needs a value"),
            ("type=dir,dst=/a,src=/b,relabel=z", "use shared or private"),
            ("type=dir,dst=/a,src=/b,relabel=shared,relabel=private", "relabel occurs twice"),
            ("type=memory,dst=/a,relabel=shared", "type=memory does not take relabel"),
            ("type=self,dst=/a,relabel=shared", "type=self does not take relabel"),
        ];
        for (text, expect) in cases {
            check(text, Err(expect));
        }
    }
}
