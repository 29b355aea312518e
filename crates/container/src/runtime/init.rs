//! An init program for containers, which does the work of PID 1: it reaps orphans and forwards signals. Such programs
//! are small and packaged everywhere, so Quire does not include one.

use std::ffi::OsStr;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use crate::bundle::spec::{RuntimeSpec, SpecMount};
use crate::runtime::elf::HEADERS;
use crate::runtime::program::is_static;

/// Path of the init program in the container. Every container has a file system at `/dev`, and the runtime creates
/// the mount point there before the file system becomes read-only.
pub const PLACE: &str = "/dev/init";

/// Names of init programs, the best known first. All of them end their own options at `--`.
const NAMES: [&str; 4] = ["catatonit", "tini-static", "docker-init", "tini"];

/// Folders besides `PATH` in which packages install init programs. Source: podman's and Docker's packages.
const FOLDERS: [&str; 5] = [
    "/usr/libexec/podman",
    "/usr/lib/podman",
    "/usr/libexec/docker",
    "/usr/libexec/catatonit",
    "/usr/local/libexec/podman",
];

/// Reason why no init program can be used.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// The search found none of the known programs.
    #[error(
        "--init needs catatonit, tini or docker-init as a static program, but none is installed: \
        install catatonit (Debian, Fedora, SUSE) or tini, or name one with --init-path"
    )]
    None,
    /// The program of `--init-path` is not a static program for this machine.
    #[error(
        "--init-path {}: it is not a static program for this machine, and cannot load libraries \
        from the image",
        .0.display()
    )]
    NotStatic(PathBuf),
    /// The program of `--init-path` cannot be read.
    #[error("--init-path {}: cannot read the file", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// The path is not UTF-8, which a runtime's configuration needs.
    #[error("--init-path {}: it is not UTF-8, which runtimes need", .0.display())]
    Name(PathBuf),
}

/// Returns the path of an init program: `wanted`, or the first one found in `search_path`, which has the syntax of
/// `PATH`, or in the folders of packages.
pub fn find_init(search_path: &OsStr, wanted: Option<&Path>) -> Result<String, InitError> {
    let text = |path: &Path| {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        path.into_os_string().into_string().map_err(|path| InitError::Name(path.into()))
    };
    if let Some(path) = wanted {
        return match is_usable(path) {
            Ok(true) => text(path),
            Ok(false) => Err(InitError::NotStatic(path.to_owned())),
            Err(source) => Err(InitError::Read { path: path.to_owned(), source }),
        };
    }
    let folders = FOLDERS.iter().map(PathBuf::from);
    let folders: Vec<_> =
        std::env::split_paths(search_path).filter(|it| it.is_absolute()).chain(folders).collect();
    let mut paths = NAMES.iter().flat_map(|name| folders.iter().map(move |it| it.join(name)));
    let found = paths.find(|path| is_usable(path).unwrap_or(false)).ok_or(InitError::None)?;
    text(&found)
}

fn is_usable(path: &Path) -> std::io::Result<bool> {
    let file = std::fs::File::from(kernel::files::open_to_read(path)?);
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.permissions().mode() & 0o111 == 0 {
        return Ok(false);
    }
    let mut start = Vec::new();
    file.take(HEADERS).read_to_end(&mut start)?;
    Ok(is_static(&start))
}

/// Mounts the init program in the container, and puts it before the command in the configuration.
pub fn add(path: &str, spec: &mut RuntimeSpec) {
    let options = ["bind", "rprivate", "ro", "nosuid", "nodev"];
    spec.mounts.push(SpecMount::new(PLACE, "bind", path, &options));
    spec.process.args.splice(0..0, [PLACE.to_owned(), "--".to_owned()]);
}

#[cfg(test)]
mod tests {
    use rustix::fs::Mode;

    use super::*;

    #[test]
    fn only_static_programs_are_taken() {
        let folder = tempfile::tempdir().unwrap();
        let find_here = |wanted: Option<&Path>| find_init(folder.path().as_os_str(), wanted);
        let put = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
            path
        };
        // `bare` has no program header that names a loader; the program of this test has one.
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let mut bare = own[..120].to_vec();
        bare[32..40].copy_from_slice(&64_u64.to_le_bytes());
        bare[56..58].copy_from_slice(&1_u16.to_le_bytes());
        bare[64..68].copy_from_slice(&1_u32.to_le_bytes());
        let script = put("script", b"#!/bin/sh\n");
        assert!(matches!(find_here(Some(&script)), Err(InitError::NotStatic(_))));
        let none = folder.path().join("none");
        assert!(matches!(find_here(Some(&none)), Err(InitError::Read { .. })));
        let pipe = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, Mode::RWXU).unwrap();
        assert!(matches!(find_here(Some(&pipe)), Err(InitError::NotStatic(_))));
        let path = put("catatonit", &bare);
        assert_eq!(find_here(None).unwrap(), path.to_str().unwrap());
        if cfg!(target_env = "gnu") {
            put("catatonit", &own);
            let path = put("tini-static", &bare);
            assert_eq!(find_here(None).unwrap(), path.to_str().unwrap());
        }
    }
}
