//! Containers on this kernel, with the runtimes that are here. Needs root.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use image::erofs::{Profile, Versions};
use image::tree::{Builder, Content, InodeId, Link, Location, Metadata, Node, XattrsId};
use kernel::mount::Backing;
use kernel::process::{Exit, Signals};
use quire_container::ProgramError;
use quire_container::bundle::config::ImageConfig;
use quire_container::bundle::security::Security;
use quire_container::bundle::{Access, Network, Terminal, Wishes, configure};
use quire_container::folder::ROOT;
use quire_container::life::monitor::{RunError, Start};
use quire_container::life::stage::Stage;
use quire_container::life::state::End;
use quire_container::root::{PageDomain, Root, Shape, Space, Trust, VerityPolicy, Writable, make};
use quire_container::runtime::Runtime;
use store::{OpenOptions, PermittedImage, Resolved, Store, Transaction, UsePolicy};

/// Whether mounts can be made here; says so when not.
fn can_mount() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        testing::skipped("containers need root");
    }
    root
}

/// Every runtime of this machine.
fn runtimes() -> Vec<Runtime> {
    let path = "/usr/local/bin:/usr/bin:/usr/local/sbin:/usr/sbin:/bin:/sbin".as_ref();
    let names = ["crun", "runc"];
    let found = names.iter().filter_map(|name| Runtime::find(path, Some(name.as_ref()), None).ok());
    let found: Vec<_> = found.collect();
    if found.is_empty() {
        testing::skipped("crun is not installed");
    }
    found
}

/// A policy that allows everything.
struct Anything;

impl UsePolicy for Anything {
    type Refusal = Infallible;

    fn check(&self, _: &Store, _: &Resolved) -> Result<(), Infallible> {
        Ok(())
    }
}

/// A store with an image of some programs of this machine and their libraries.
struct Fixture {
    folder: tempfile::TempDir,
    store: Store,
    image: PermittedImage,
}

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(&folder.path().join("store"), OpenOptions::create()).unwrap();
        let import = store.begin().unwrap();
        let mut builder = Builder::new();
        for program in ["/bin/sh", "/bin/true", "/bin/cat", "/bin/sleep", "/bin/id"] {
            for file in with_libraries(Path::new(program)) {
                add(&mut builder, &import, &file, &std::fs::read(&file).unwrap(), 0o755);
            }
        }
        let script = Path::new("/bin/script");
        add(&mut builder, &import, script, b"#!/no/such/interpreter\n", 0o755);
        add(&mut builder, &import, Path::new("/bin/garbage"), b"garbage\n", 0o755);
        add(&mut builder, &import, Path::new("/etc/plain"), b"not a program\n", 0o644);
        for directory in ["proc", "sys", "dev", "tmp"] {
            builder.subdirectory(InodeId::ROOT, directory.as_bytes()).unwrap();
        }
        let mut draft = import.image().unwrap();
        let profile = Profile::Composefs(Versions::default());
        image::erofs::write(&builder.finish(), &profile, &mut draft).unwrap();
        let image = draft.finish().unwrap();
        import.commit().unwrap();
        let found = Resolved { image, name: None, manifest: None };
        let Ok(permitted) = store.permit(&Anything, found);
        let image = permitted.open(&store).unwrap();
        Self { folder, store, image }
    }

    fn root(&self, writable: Writable<'_>) -> Root {
        let trust = Trust {
            verity: VerityPolicy::Off,
            digest: None,
            domain: PageDomain::OfStore,
            backing: Backing::File,
        };
        let shape = Shape { writable, map: None, space: Space::AsIs, places: &[] };
        make(&self.store, &self.image, &trust, &shape, std::iter::empty()).unwrap()
    }

    /// Runs a command in a thread of its own: the mount namespace that it makes stays with the thread.
    fn run(&self, runtime: &Runtime, command: &[&str], access: Access) -> Result<End, RunError> {
        std::thread::scope(|scope| {
            scope.spawn(|| self.run_here(runtime, command, access)).join().unwrap()
        })
    }

    fn run_here(
        &self,
        runtime: &Runtime,
        command: &[&str],
        access: Access,
    ) -> Result<End, RunError> {
        let folder = tempfile::tempdir_in(self.folder.path()).unwrap();
        let writable = match access {
            Access::Writable => Writable::Memory { bytes: None },
            Access::ReadOnly => Writable::None,
        };
        let root = self.root(writable);
        let image = ImageConfig::default();
        let wishes = Wishes {
            command: command.iter().map(|&it| it.to_owned()).collect(),
            entrypoint: None,
            env: Vec::new(),
            working_dir: None,
            hostname: "test".to_owned(),
            terminal: Terminal::None,
            network: Network::None,
            names: Vec::new(),
            access,
            volumes: Vec::new(),
            map: None,
            cgroup: None,
            memory: None,
            pids: None,
            cpu: quire_container::bundle::Cpu::default(),
            security: Security::default(),
        };
        let user = quire_container::bundle::user::find(root.mount.as_fd(), "").unwrap();
        let (process, config) =
            configure(root.mount.as_fd(), ROOT, &image, &wishes, &user).unwrap();
        let id = folder.path().file_name().unwrap().to_str().unwrap().replace('.', "q");
        let start = Start {
            id: &id,
            folder: folder.path(),
            lock: None,
            root: &root.mount,
            stage: &Stage::new(folder.path(), None),
            owner: None,
            process: &process,
            config,
            terminal: wishes.terminal,
            console: None,
            runtime,
            signals: &Signals::block(&[]).unwrap(),
            headrooms: &[],
            log_size: None,
            timeout: None,
            notes: None,
        };
        let result = quire_container::life::monitor::run(&start, &|_| {});
        assert!(quire_container::life::teardown::clear(folder.path(), &id));
        result
    }
}

fn add(
    builder: &mut Builder,
    import: &Transaction<'_>,
    path: &Path,
    bytes: &[u8],
    permissions: u16,
) {
    let bytes_of = std::os::unix::ffi::OsStrExt::as_bytes;
    let mut directory = InodeId::ROOT;
    let names: Vec<_> = image::tree::components(bytes_of(path.as_os_str())).collect();
    let (name, parents) = names.split_last().unwrap();
    for parent in parents {
        directory = builder.subdirectory(directory, parent).unwrap();
    }
    if builder.lookup(directory, name).is_some() {
        return;
    }
    let object = import.object(bytes).unwrap();
    let size = u64::try_from(bytes.len()).unwrap();
    let content = Content::External { size, object: Some(object), location: Location::Object };
    let metadata = Metadata { permissions, ..Metadata::IMPLICIT };
    let inode = builder.inode(&metadata, XattrsId::NONE, Node::Regular(content)).unwrap();
    builder.insert(directory, name, inode, Link::Equal).unwrap();
}

/// A program and every library that `ldd` says it loads, by the paths it loads them from.
fn with_libraries(program: &Path) -> Vec<PathBuf> {
    let output = Command::new("ldd").arg(program).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let words = text.split_whitespace().filter(|word| word.starts_with('/'));
    let all: BTreeSet<PathBuf> = words.map(PathBuf::from).collect();
    std::iter::once(program.to_owned()).chain(all).collect()
}

fn mounts() -> String {
    std::fs::read_to_string("/proc/self/mountinfo").unwrap()
}

#[test]
fn exit_codes_are_the_programs() {
    if !can_mount() {
        return;
    }
    let fixture = Fixture::new();
    let cases: [(&[&str], i32); 5] = [
        (&["true"], 0),
        (&["sh", "-c", "exit 7"], 7),
        (&["sh", "-c", "echo x > /tmp/new && cat /tmp/new && exit 3"], 3),
        (&["sh", "-c", "kill -TERM $$; sleep 1; exit 4"], 4),
        (&["sh", "-c", "sh -c 'kill -KILL $$'"], 137),
    ];
    for runtime in runtimes() {
        for (command, expect) in cases {
            let exit = fixture.run(&runtime, command, Access::Writable).unwrap().exit;
            assert_eq!(exit, Exit::Code(expect), "{command:?} by {runtime:?}");
        }
    }
}

#[test]
fn a_read_only_root_is_one() {
    if !can_mount() {
        return;
    }
    let fixture = Fixture::new();
    for runtime in runtimes() {
        let command = ["sh", "-c", "echo x > /tmp/new || exit 9"];
        let exit = fixture.run(&runtime, &command, Access::ReadOnly).unwrap().exit;
        assert_ne!(exit, Exit::Code(0), "{runtime:?}");
    }
}

#[test]
fn what_can_not_start_says_why() {
    if !can_mount() {
        return;
    }
    let fixture = Fixture::new();
    for runtime in runtimes() {
        let error = |command| fixture.run(&runtime, &[command], Access::Writable).unwrap_err();
        assert!(matches!(error("nowhere"), RunError::Program(ProgramError::NotFound { .. })));
        assert!(matches!(error("/bin/nowhere"), RunError::Program(ProgramError::NotFound { .. })));
        assert!(matches!(
            error("/etc/plain"),
            RunError::Program(ProgramError::NotExecutable { .. })
        ));
        assert!(matches!(error("/etc"), RunError::Program(ProgramError::NotExecutable { .. })));
        // Runtimes find out in the very last step, and answer as the program that they never became.
        assert!(matches!(
            error("/bin/script"),
            RunError::Program(ProgramError::NoInterpreter { .. })
        ));
        assert!(matches!(error("/bin/garbage"), RunError::Program(ProgramError::Format { .. })));
    }
}

#[test]
fn nothing_is_mounted_on_the_host() {
    if !can_mount() {
        return;
    }
    let before = mounts();
    let fixture = Fixture::new();
    for runtime in runtimes() {
        fixture.run(&runtime, &["true"], Access::Writable).unwrap();
    }
    assert_eq!(mounts(), before);
}

#[test]
fn a_writable_root_looks_like_the_image() {
    if !can_mount() {
        return;
    }
    let fixture = Fixture::new();
    let read_only = fixture.root(Writable::None);
    let writable = fixture.root(Writable::Memory { bytes: None });
    let stat = |root: &Root| {
        let stat = rustix::fs::fstat(root.mount.as_fd()).unwrap();
        (stat.st_mode, stat.st_uid, stat.st_gid, stat.st_mtime, stat.st_mtime_nsec)
    };
    assert_eq!(stat(&read_only), stat(&writable));
    assert!(!read_only.mount.is_writable().unwrap());
    assert!(writable.mount.is_writable().unwrap());
}
