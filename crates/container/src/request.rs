//! The settings of a container, as its folder keeps them: with them it is started again, and others are made like it.

use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use store::OperationError;

use crate::bundle::Terminal;
use crate::bundle::mounts::MountSource;
use crate::bundle::userns::IdMap;
use crate::folder::REQUEST;
use crate::plan::{ContainerRequest, IdsChoice};
use crate::root::WritableChoice;

/// Version of the format. It is raised for each field whose absence would change a container.
const VERSION: u32 = 2;

/// The format of Quire 0.1, which lacks the fields with a default.
const VERSION_0_1: u32 = 1;

/// Maximum size of the file, in bytes. The longest part is a seccomp profile.
const LARGEST: u64 = 16 << 20;

/// The settings of a container, and its runtime.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredRequest {
    /// Path of the runtime that runs the container.
    pub runtime: PathBuf,
    pub request: ContainerRequest,
}

/// The file.
#[derive(Serialize)]
struct WrittenRequest<'a> {
    version: u32,
    runtime: &'a Path,
    request: &'a ContainerRequest,
}

/// The field that all versions have.
#[derive(Deserialize)]
struct RequestVersion {
    version: u32,
}

/// Fields of this version.
#[derive(Deserialize)]
struct FoundRequest {
    runtime: PathBuf,
    request: ContainerRequest,
}

/// Reason why the settings of a container cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The folder lacks the file.
    #[error(
        "the settings of container {0} are not recorded, because a version of Quire made it that \
        could not start containers again: `quire commit {0} IMAGE` makes an image of its \
        changes, and `quire run` starts another container"
    )]
    Absent(String),
    /// Another version of Quire has written the file.
    #[error(
        "the settings of container {id} are recorded in format {found}, and this version of Quire \
        reads formats up to {VERSION}: use the version that made the container, or \
        `quire commit {id} IMAGE`, which makes an image of its changes"
    )]
    Version {
        id: String,
        /// Version of the format.
        found: u32,
    },
    /// The file was cut short by a crash of the host, or changed.
    #[error(
        "the settings of container {id} are damaged: `quire commit {id} IMAGE` makes an image of \
        its changes, and `quire rm {id}` removes it"
    )]
    Damaged { id: String, source: serde_json::Error },
    #[error(transparent)]
    Failed(#[from] OperationError),
}

impl StoredRequest {
    /// Returns the text of the file for these settings.
    ///
    /// # Errors
    /// If a path is not UTF-8, or if the settings are too long to be read again.
    pub fn encode(runtime: &Path, request: &ContainerRequest) -> Result<Vec<u8>, OperationError> {
        let object = format!("the settings of container {}", request.id);
        let written = WrittenRequest { version: VERSION, runtime, request };
        let text = serde_json::to_vec(&written).map_err(OperationError::of("record", &object))?;
        if text.len() as u64 > LARGEST {
            let reason = format!(
                "they may have {} MiB as JSON, and these have {}: use shorter options, variables and labels",
                LARGEST >> 20,
                text.len().div_ceil(1 << 20)
            );
            return Err(OperationError::of("record", &object)(reason));
        }
        Ok(text)
    }

    /// Writes the file into the folder of a new container. Only its user may read it, because variables may be
    /// passwords.
    pub(crate) fn write(text: &[u8], folder: &Path) -> std::io::Result<()> {
        let path = folder.join(REQUEST);
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
        file.write_all(text)
    }

    /// Reads the settings of the container `id` with this folder.
    ///
    /// # Errors
    /// [`RequestError`] if there are none that this version understands.
    pub fn load(folder: &Path, id: &str) -> Result<Self, RequestError> {
        let path = folder.join(REQUEST);
        let failed = OperationError::at("read", &path);
        let file = match File::options().read(true).custom_flags(NO_WAIT).open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(RequestError::Absent(id.to_owned()));
            }
            file => file.map_err(failed)?,
        };
        let mut bytes = Vec::new();
        file.take(LARGEST).read_to_end(&mut bytes).map_err(failed)?;
        Self::decode(&bytes, id)
    }

    fn decode(bytes: &[u8], id: &str) -> Result<Self, RequestError> {
        let damaged = |source| RequestError::Damaged { id: id.to_owned(), source };
        let RequestVersion { version } = serde_json::from_slice(bytes).map_err(damaged)?;
        if version != VERSION && version != VERSION_0_1 {
            return Err(RequestError::Version { id: id.to_owned(), found: version });
        }
        let FoundRequest { runtime, request } = serde_json::from_slice(bytes).map_err(damaged)?;
        Ok(Self { runtime, request })
    }

    /// Returns the settings for another container that is like this one.
    ///
    /// - Its host name is its id, if this container's host name is this container's id. The files for names, such as
    ///   `/etc/hosts`, are made from the settings when it starts.
    /// - It has no published ports and no chosen addresses, because this container's are in use.
    /// - It has its own volumes where this container has volumes without a name, and the same named ones.
    /// - If this container writes into a directory of the host, it gets its own directory in the store, because two
    ///   containers cannot share one.
    /// - It has no terminal, and is kept after its end.
    /// - With a snapshot, its users have the ids of `base.map`, to which the snapshot's files belong.
    #[must_use]
    pub fn for_child(self, id: &str, base: ChildBase) -> ContainerRequest {
        let ContainerRequest {
            id: parent, mut bundle, mut pasta, mut networks, writable, ids, ..
        } = self.request.clone();
        let mut volumes = self.request.volumes.clone();
        for volume in &mut volumes {
            if let MountSource::Anonymous(name) = &mut volume.source {
                *name = None;
            }
        }
        if bundle.hostname == parent {
            id.clone_into(&mut bundle.hostname);
        }
        bundle.terminal = Terminal::None;
        if let Some(pasta) = &mut pasta {
            pasta.ports.clear();
        }
        if let Some(networks) = &mut networks {
            networks.ports.clear();
            networks.networks.iter_mut().for_each(|it| it.address = None);
        }
        let writable = match writable {
            WritableChoice::Directory(_, durability) => WritableChoice::Folder(None, durability),
            other => other,
        };
        let ids = match (base.snapshot.is_some(), base.map) {
            (true, Some(map)) => IdsChoice::Map(map),
            (true, None) => IdsChoice::Host,
            (false, _) => ids,
        };
        ContainerRequest {
            id: id.to_owned(),
            bundle,
            pasta,
            networks,
            writable,
            ids,
            volumes,
            keep: true,
            snapshot: base.snapshot,
            ..self.request
        }
    }
}

/// Layers with which a child begins.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChildBase {
    /// Id of the uppermost snapshot below the child's writable layer; `None` for only the image.
    pub snapshot: Option<String>,
    /// Map to whose ids the snapshot's files belong; `None` for the host's ids.
    pub map: Option<IdMap>,
}

/// Flags for a file that may have been replaced by a FIFO or a link.
const NO_WAIT: i32 = {
    let flags = rustix::fs::OFlags::NONBLOCK.union(rustix::fs::OFlags::NOFOLLOW);
    flags.bits().cast_signed()
};

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::num::{NonZeroU16, NonZeroU32, NonZeroU64};
    use std::os::unix::fs::PermissionsExt as _;

    use image::verity::{Algorithm, digest};
    use kernel::mount::{Backing, Durability};

    use super::*;
    use crate::bundle::etc_files::{Host, Names, Resolver, TimeZone};
    use crate::bundle::mounts::{MountKind, MountRequest, Restrictions, Volume};
    use crate::bundle::process_settings::ProcessSettings;
    use crate::bundle::security::{
        AppArmor, Capabilities, Device, Filter, Interfaces, Profile, Security,
    };
    use crate::bundle::{Access, BundleOptions, Cpu, Network};
    use crate::network::{Pasta, Ports, Protocol};
    use crate::networks::{JoinedNetworks, NetworkJoin};
    use crate::plan::InitChoice;
    use crate::restart_policy::RestartPolicy;
    use crate::root::{PageDomain, Trust, VerityPolicy, Warm};

    #[test]
    fn settings_that_could_not_be_read_again_are_refused() {
        let encode = |count: usize| {
            let labels = BTreeMap::from([("a".to_owned(), "\u{1}".repeat(count))]);
            StoredRequest::encode(Path::new("/crun"), &ContainerRequest { labels, ..full() })
        };
        let most = usize::try_from(LARGEST).unwrap() / 6;
        let error = encode(most).unwrap_err();
        assert!(format!("{error:?}").contains("as JSON"), "{error:?}");
        let text = encode(most - 2000).unwrap();
        StoredRequest::decode(&text, "id").unwrap();
    }

    /// Settings in which no field has its default.
    fn full() -> ContainerRequest {
        let strings = |all: &[&str]| all.iter().map(|&it| it.to_owned()).collect::<Vec<_>>();
        let size = NonZeroU64::new(1 << 30);
        let profile = br#"{"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [{"names": ["read"]}]}"#;
        let bundle = BundleOptions {
            command: strings(&["sh", "-c", "\u{7f}ü\n"]),
            entrypoint: Some(strings(&["env"])),
            env: strings(&["A=", "PASSWORD=x y"]),
            working_dir: Some("/w".to_owned()),
            hostname: "parent".to_owned(),
            terminal: Terminal::New,
            network: Network::Pasta,
            access: Access::Writable,
            is_limited: true,
            memory: size,
            pids: NonZeroU32::new(7),
            cpu: Cpu {
                quota: NonZeroU32::new(50_000),
                shares: NonZeroU64::new(3),
                cpus: Some("0-1".to_owned()),
            },
            security: Security {
                capabilities: Capabilities::new(false, &[], &strings(&["CHOWN"])).unwrap(),
                filter: Filter::Profile(Profile::read(profile).unwrap()),
                apparmor: AppArmor::Named("p".to_owned()),
                no_new_privileges: true,
                interfaces: Interfaces::Open,
                devices: vec![Device::from_argument("/dev/null:/dev/nothing:rw").unwrap()],
                limits: vec!["core=0:-1".parse().unwrap()],
            },
            process: ProcessSettings {
                groups: strings(&["adm"]),
                keep_groups: true,
                sysctl: BTreeMap::from([("kernel.sem".to_owned(), "1 2 3 4".to_owned())]),
                umask: Some(0o77),
                oom_score: Some(-7),
            },
            ..BundleOptions::new(String::new())
        };
        let mounts = [
            MountKind::Memory { bytes: size, mode: 0o1777, noexec: true },
            MountKind::Filestore { bytes: size, mode: 0o700, durability: Durability::Durable },
            MountKind::Host("/srv".to_owned()),
        ];
        let ports = Ports {
            address: Some("::1".parse().unwrap()),
            host: 8080,
            container: 80,
            count: NonZeroU16::MIN,
            protocol: Protocol::Udp,
        };
        ContainerRequest {
            id: "parent".to_owned(),
            bundle,
            user: Some("7:8".to_owned()),
            trust: Trust {
                verity: VerityPolicy::Require,
                digest: Some(digest(Algorithm::Sha512, b"x").into()),
                domain: PageDomain::Named("d".to_owned()),
                backing: Backing::Loop,
            },
            writable: WritableChoice::Directory("/kept".into(), Durability::Durable),
            df: true,
            warm: Warm::Metadata,
            ids: IdsChoice::Auto(NonZeroU32::MIN),
            volumes: vec![Volume {
                source: MountSource::Host("/a".to_owned()),
                destination: "/b".to_owned(),
                access: Access::ReadOnly,
                chown: true,
                restrictions: Restrictions { noexec: true, ..Restrictions::default() },
            }]
            .into_iter()
            .chain(["data:/d", "/own"].map(|it| it.parse().unwrap()))
            .collect(),
            mounts: mounts
                .map(|kind| MountRequest {
                    kind,
                    destination: "/m".to_owned(),
                    access: Access::Writable,
                    relabels: true,
                })
                .to_vec(),
            pasta: Some(Pasta {
                program: "/usr/bin/pasta".into(),
                ports: vec![ports],
                options: "-m,1280".parse().unwrap(),
            }),
            networks: Some(JoinedNetworks {
                networks: vec![NetworkJoin {
                    name: "n".to_owned(),
                    address: Some("10.90.0.7".parse().unwrap()),
                }],
                aliases: strings(&["db"]),
                ports: vec![ports],
            }),
            names: Some(Names {
                hosts: Some(vec![Host {
                    address: "10.0.0.1".parse().unwrap(),
                    names: strings(&["db"]),
                }]),
                resolver: Some(Resolver {
                    servers: Some(vec!["1.1.1.1".parse().unwrap()]),
                    search: Some(strings(&["example.org"])),
                    options: Some(strings(&["ndots:2"])),
                }),
                zone: Some(TimeZone::Named("UTC".to_owned())),
            }),
            init: InitChoice::Program("/sbin/tini".into()),
            stop_signal: Some("INT".to_owned()),
            stop_timeout: Some(3),
            timeout: 9,
            log_size: size,
            keep: true,
            labels: BTreeMap::from([("k".to_owned(), "v".to_owned())]),
            stdin: true,
            restart: RestartPolicy::OnFailure { most: 3 },
            no_log: true,
            rests: false,
            snapshot: None,
        }
    }

    fn stored(request: ContainerRequest) -> StoredRequest {
        StoredRequest { runtime: "/usr/bin/crun".into(), request }
    }

    #[test]
    fn what_is_written_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let map = "0:100000:10\n0:200000:10".parse().unwrap();
        let choices = [
            (WritableChoice::None, IdsChoice::Host),
            (WritableChoice::Memory(NonZeroU64::new(5)), IdsChoice::Map(map)),
            (WritableChoice::Filestore(None, Durability::Volatile), IdsChoice::Host),
            (WritableChoice::Folder(NonZeroU64::new(5), Durability::Durable), IdsChoice::Host),
        ];
        let changed = choices.map(|(writable, ids)| ContainerRequest { writable, ids, ..full() });
        for request in changed.into_iter().chain([full(), ContainerRequest::new("parent")]) {
            let text = StoredRequest::encode(Path::new("/usr/bin/crun"), &request).unwrap();
            StoredRequest::write(&text, folder.path()).unwrap();
            let path = folder.path().join(REQUEST);
            let mode = std::fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o7777, 0o600);
            let found = StoredRequest::load(folder.path(), "parent").unwrap();
            assert_eq!(found, stored(request));
            std::fs::remove_file(path).unwrap();
        }
    }

    /// Fields that later steps set must not be taken from the file.
    #[test]
    fn what_depends_on_one_start_is_not_written() {
        let mut request = full();
        request.bundle.network_place = Some("/net".to_owned());
        request.bundle.map = Some("0:1:1\n0:1:1".parse().unwrap());
        request.bundle.cgroup = Some("/quire-x".to_owned());
        request.bundle.volumes.clone_from(&request.volumes);
        request.snapshot = Some("0123456789ab".to_owned());
        let text = StoredRequest::encode(Path::new("/r"), &request).unwrap();
        assert_eq!(StoredRequest::decode(&text, "parent").unwrap().request, full());
    }

    #[test]
    fn what_another_version_or_a_crash_has_written_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let check = |text: &[u8], expect: &str| {
            std::fs::write(folder.path().join(REQUEST), text).unwrap();
            let error = StoredRequest::load(folder.path(), "c").unwrap_err().to_string();
            assert!(error.contains(expect) && error.contains("quire commit c IMAGE"), "{error}");
        };
        let error = StoredRequest::load(folder.path(), "c").unwrap_err().to_string();
        assert!(error.contains("are not recorded") && error.contains("quire run"), "{error}");
        check(b"", "damaged");
        check(&[0; 4096], "damaged");
        check(br#"{"version":3,"runtime":[]}"#, "format 3");
        check(br#"{"version":2}"#, "damaged");
        check(br#"{"version":1}"#, "damaged");
        let whole = StoredRequest::encode(Path::new("/r"), &full()).unwrap();
        for length in [1, 20, whole.len() / 2, whole.len() - 1] {
            check(&whole[..length], "damaged");
        }
        // A field that this version does not know might be a right that the container must not have.
        let text = String::from_utf8(whole).unwrap();
        let unknown = text.replacen("\"stop_signal\"", "\"new\":1,\"stop_signal\"", 1);
        assert_ne!(text, unknown);
        check(unknown.as_bytes(), "damaged");
        for (right, wrong) in [("\"CAP_FOWNER\"", "\"CAP_X\""), ("core=0:-1", "core=1:0")] {
            assert!(text.contains(right), "{text}");
            check(text.replacen(right, wrong, 1).as_bytes(), "damaged");
        }
    }

    #[test]
    fn the_format_of_0_1_is_read() {
        let text = StoredRequest::encode(Path::new("/r"), &ContainerRequest::new("c")).unwrap();
        let mut value: serde_json::Value = serde_json::from_slice(&text).unwrap();
        value["version"] = 1.into();
        let request = value["request"].as_object_mut().unwrap();
        for field in ["labels", "stdin", "restart", "no_log", "networks"] {
            assert!(request.remove(field).is_some(), "{field}");
        }
        assert!(request["bundle"].as_object_mut().unwrap().remove("process").is_some());
        let found = StoredRequest::decode(&serde_json::to_vec(&value).unwrap(), "c").unwrap();
        assert_eq!(found.request, ContainerRequest::new("c"));
    }

    #[test]
    fn a_child_has_what_its_parent_does_not_use() {
        let map: IdMap = "0:100000:10\n0:200000:10".parse().unwrap();
        let snapshot = Some("0123456789ab".to_owned());
        let base = ChildBase { snapshot: snapshot.clone(), map: Some(map.clone()) };
        let mut parent = full();
        parent.volumes[2].source = MountSource::Anonymous(Some("0123".to_owned()));
        let child = stored(parent).for_child("child", base);
        let mut expect = full();
        expect.id = "child".to_owned();
        expect.bundle.hostname = "child".to_owned();
        expect.bundle.terminal = Terminal::None;
        expect.pasta.as_mut().unwrap().ports.clear();
        let networks = expect.networks.as_mut().unwrap();
        networks.ports.clear();
        networks.networks[0].address = None;
        expect.writable = WritableChoice::Folder(None, Durability::Durable);
        expect.ids = IdsChoice::Map(map);
        expect.snapshot = snapshot.clone();
        assert_eq!(child, expect);
        let mut named = full();
        named.bundle.hostname = "db.example.org".to_owned();
        named.keep = false;
        let child = stored(named).for_child("child", ChildBase::default());
        assert_eq!(child.bundle.hostname, "db.example.org");
        assert_eq!((child.ids, child.snapshot, child.keep), (full().ids, None, true));
        let child = stored(full()).for_child("child", ChildBase { snapshot, map: None });
        assert_eq!(child.ids, IdsChoice::Host);
    }
}
