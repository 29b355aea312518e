//! Containers in the foreground, and their roots.

use std::os::fd::AsFd as _;

use kernel::process::{Exit, Signals};
use quire_container::ProgramError;
use quire_container::bundle::config::ImageConfig;
use quire_container::bundle::{Access, BundleOptions, configure};
use quire_container::folder::ROOT;
use quire_container::life::log::LogLimit;
use quire_container::life::monitor::{RunError, Start};
use quire_container::life::mount_staging::Stage;
use quire_container::life::state::End;
use quire_container::restart_policy::RestartPolicy;
use quire_container::root::{
    BetweenOwners, Root, Shape, Space, Trust, TrustedImage, VerityPolicy, Via, Writable, make,
};
use quire_container::runtime::Runtime;
use quire_container::runtime::caller_fds::CallerFds;

use crate::fixture::{Fixture, runtimes, turn};

impl Fixture {
    fn root(&self, writable: Writable<'_>) -> Root {
        let trust = Trust { verity: VerityPolicy::Off, ..Trust::default() };
        let shape = Shape {
            writable,
            map: None,
            space: Space::AsIs,
            places: &[],
            claimed: &[],
            between: &[],
            between_owners: BetweenOwners::Image,
            via: Via::Tree,
            source: None,
        };
        let image = TrustedImage::to_run(&self.store, self.image(), trust).unwrap();
        make(&self.store, &image, &shape, std::iter::empty()).unwrap()
    }

    /// Runs a command in a separate thread, with which the new mount namespace ends.
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
        let command = command.iter().map(|&it| it.to_owned()).collect();
        let options = BundleOptions { command, access, ..BundleOptions::new("test".to_owned()) };
        let user = quire_container::bundle::user::find_user(root.mount.as_fd(), "").unwrap();
        let (process, spec) = configure(root.mount.as_fd(), ROOT, &image, &options, &user).unwrap();
        let id = folder.path().file_name().unwrap().to_str().unwrap().replace('.', "q");
        let start = Start {
            id: &id,
            folder: folder.path(),
            lock: None,
            root: &root.mount,
            stage: &Stage::new(folder.path(), 0, None),
            owner: None,
            process: &process,
            spec,
            terminal: options.terminal,
            has_open_stdin: false,
            fds: &CallerFds::default(),
            streams: None,
            console: None,
            runtime,
            signals: &Signals::block(&[]).unwrap(),
            headrooms: &[],
            log_size: LogLimit::Unlimited,
            restart: RestartPolicy::No,
            timeout: None,
            pasta: None,
            networks: None,
            notes: None,
        };
        let result = quire_container::life::monitor::run(&start, &|_| {});
        assert!(quire_container::life::end::teardown::clear(folder.path(), &id));
        result
    }
}

fn mounts() -> String {
    std::fs::read_to_string("/proc/self/mountinfo").unwrap()
}

#[test]
fn exit_codes_are_the_programs() {
    let Some(_turn) = turn() else { return };
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
    let Some(_turn) = turn() else { return };
    let fixture = Fixture::new();
    for runtime in runtimes() {
        let command = ["sh", "-c", "echo x > /tmp/new || exit 9"];
        let exit = fixture.run(&runtime, &command, Access::ReadOnly).unwrap().exit;
        assert_ne!(exit, Exit::Code(0), "{runtime:?}");
    }
}

#[test]
fn what_can_not_start_says_why() {
    let Some(_turn) = turn() else { return };
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
        // Runtimes detect this error only in their last step, and exit with a code that the program could have
        // returned.
        assert!(matches!(
            error("/bin/script"),
            RunError::Program(ProgramError::NoInterpreter { .. })
        ));
        assert!(matches!(error("/bin/garbage"), RunError::Program(ProgramError::Format { .. })));
    }
}

#[test]
fn nothing_is_mounted_on_the_host() {
    let Some(_turn) = turn() else { return };
    let fixture = Fixture::new();
    for runtime in runtimes() {
        fixture.run(&runtime, &["true"], Access::Writable).unwrap();
    }
    // Other programs may mount file systems during the test.
    let (folder, image) = (fixture.folder.path().display(), fixture.found.image);
    let ours = [folder.to_string(), format!("quire:{image}")];
    let mounts = mounts();
    let left: Vec<_> =
        mounts.lines().filter(|line| ours.iter().any(|it| line.contains(it))).collect();
    assert_eq!(left, Vec::<&str>::new());
}

#[test]
fn a_writable_root_looks_like_the_image() {
    let Some(_turn) = turn() else { return };
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
