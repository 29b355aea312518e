//! Makes the root disk of guests: test programs, the programs that they call, and the files that they read, each at
//! the host's path.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::cache::Cache;
use crate::process::{cargo, line, need, quiet, repository, target_dir};

/// Programs that the guest's script and the tests call. If the host lacks one, tests report this in the guest.
const PROGRAMS: &str = "sh bash busybox ls cat cp mv rm ln mkdir rmdir touch chmod chown chroot stat head tail sed grep cut tr sort wc \
    find sleep true false id env date dd sync uname hostname stty seq truncate mktemp tee readlink realpath dirname basename \
    expr test printf echo timeout setsid setpriv strace kill mknod mkfifo sha256sum md5sum cmp diff tar gzip ldd \
    newuidmap newgidmap fusermount3 apparmor_parser pgrep mount umount unshare nsenter losetup mountpoint findmnt ip \
    chattr lsattr mkfs.ext4 mke2fs e2fsck debugfs script python3 docker-registry df du fincore setfattr getfattr setfacl getfacl mkfs.erofs fsck.erofs dump.erofs crun runc";

/// Programs of sid that tests find by `QUIRE_CACHE`.
const SID: [&str; 4] = ["mkfs.erofs", "fsck.erofs", "mkcomposefs", "composefs-info"];

pub(super) const GUEST: &str = include_str!("guest.sh");

/// A test program, as cargo names it.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Clone)]
pub(crate) struct Program {
    pub(crate) package: String,
    /// Name of the target; for a library's own tests, the package's name.
    pub(crate) target: String,
}

impl Program {
    /// Returns its path in the guest.
    pub(crate) fn place(&self) -> String {
        format!("/vm/tests/{}-{}", self.package, self.target)
    }
}

/// Builds `quire`, and no test program.
pub(crate) fn build_programs() -> Result<BTreeMap<Program, PathBuf>> {
    crate::process::shown(cargo().args(["build", "--quiet", "--workspace"]))?;
    Ok(BTreeMap::new())
}

/// Builds `quire` and all test programs of the workspace.
pub(crate) fn build() -> Result<BTreeMap<Program, PathBuf>> {
    let mut cargo = cargo();
    // The same arguments as for `cargo test --workspace`, so that packages are built only once.
    cargo.args(["test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"]);
    let output = cargo.stderr(std::process::Stdio::inherit()).output()?;
    if !output.status.success() {
        bail!("{}: {}", line(&cargo), output.status);
    }
    let mut programs = BTreeMap::new();
    for message in String::from_utf8_lossy(&output.stdout).lines() {
        let message: serde_json::Value = serde_json::from_str(message)?;
        let (Some(file), Some(id), Some(true)) = (
            message["executable"].as_str(),
            message["package_id"].as_str(),
            message["profile"]["test"].as_bool(),
        ) else {
            continue;
        };
        let id = id.rsplit(['/', '#']).find(|it| it.starts_with("quire-"));
        let (Some(id), Some(target)) = (id, message["target"]["name"].as_str()) else { continue };
        let package = id.split('@').next().unwrap_or(id).to_owned();
        programs.insert(Program { package, target: target.replace('_', "-") }, PathBuf::from(file));
    }
    Ok(programs)
}

/// Makes the disk `file`, with `work` for temporary files. `programs` are this repository's, each with its path in
/// the guest; `plan` and `environment` are for the guest's script.
pub(crate) fn write(
    cache: &Cache,
    work: &Path,
    programs: &[(PathBuf, PathBuf)],
    plan: &str,
    environment: &str,
    file: &Path,
) -> Result<()> {
    let mut draft = Draft::new(work.join("root"));
    draft.skeleton()?;
    for name in PROGRAMS.split_whitespace() {
        if let Some(program) = installed(name) {
            draft.program(&program)?;
        }
    }
    for (built, place) in programs {
        draft.own(built, place)?;
    }
    draft.sid(&cache.dir().join("sid"))?;
    draft.python()?;
    draft.files()?;
    draft.close(plan, environment, file)
}

/// Makes the disk for another processor: a copy of the root `base`, and these files, each with its path in the guest.
pub(super) fn write_over(
    base: &Path,
    work: &Path,
    files: &[(PathBuf, PathBuf)],
    plan: &str,
    environment: &str,
    file: &Path,
) -> Result<()> {
    let draft = Draft::new(work.join("root"));
    quiet(Command::new("cp").arg("-a").arg(base).arg(draft.root()))?;
    draft.base()?;
    for (from, place) in files {
        fs::copy(from, draft.place(place)?)?;
    }
    draft.close(plan, environment, file)
}

/// Finds a program of the host in the directories where the guest looks for it, not in those of the calling user.
pub(super) fn installed(name: &str) -> Option<PathBuf> {
    let folders = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];
    folders.iter().map(|it| Path::new(it).join(name)).find(|it| it.is_file())
}

/// Returns the directory of large test inputs, if there is one.
pub(crate) fn data() -> Option<PathBuf> {
    std::env::var_os("QUIRE_TEST_DATA").map(PathBuf::from).filter(|it| it.is_dir())
}

/// A root directory being made.
pub(super) struct Draft {
    root: PathBuf,
    /// Files of the host that were copied already.
    done: BTreeSet<PathBuf>,
}

impl Draft {
    pub(super) fn new(root: PathBuf) -> Self {
        Self { root, done: BTreeSet::new() }
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the path in the draft for the guest's `path`, and creates its parents.
    fn place(&self, path: &Path) -> Result<PathBuf> {
        let place = self.root.join(path.strip_prefix("/").unwrap_or(path));
        fs::create_dir_all(place.parent().context("a file has a folder")?)?;
        Ok(place)
    }

    pub(super) fn text(&self, path: &str, text: &str, mode: u32) -> Result<()> {
        let place = self.place(Path::new(path))?;
        fs::write(&place, text)?;
        Ok(fs::set_permissions(&place, fs::Permissions::from_mode(mode))?)
    }

    /// Adds the guest's script, and makes the disk `file`.
    fn close(&self, plan: &str, environment: &str, file: &Path) -> Result<()> {
        self.text("vm/init", GUEST, 0o755)?;
        self.text("vm/plan", plan, 0o644)?;
        self.text("vm/environment", environment, 0o644)?;
        let mut mkfs = Command::new(need("mkfs.ext4")?);
        // fs-verity needs blocks of the size of a page.
        mkfs.args([
            "-q",
            "-F",
            "-b",
            "4096",
            "-O",
            "verity",
            "-m",
            "0",
            "-E",
            "lazy_itable_init=1,root_owner=0:0",
        ]);
        quiet(mkfs.arg("-d").arg(&self.root).arg(file).arg("2G"))?;
        Ok(())
    }

    /// Creates directories, and the files in `etc` that do not depend on the host.
    fn base(&self) -> Result<()> {
        for dir in ["proc", "sys", "dev", "run", "tmp", "mnt", "root", "etc", "vm/tests", "var/tmp"]
        {
            fs::create_dir_all(self.root.join(dir))?;
        }
        fs::set_permissions(self.root.join("tmp"), fs::Permissions::from_mode(0o1777))?;
        self.text(
            "etc/passwd",
            "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
            0o644,
        )?;
        // Tests add a user's ids by mounts on these files.
        self.text("etc/subuid", "", 0o644)?;
        self.text("etc/subgid", "", 0o644)?;
        self.text("etc/group", "root:x:0:\nnogroup:x:65534:\n", 0o644)?;
        self.text("etc/hosts", "127.0.0.1 localhost\n", 0o644)?;
        symlink("/proc/self/mounts", self.root.join("etc/mtab"))?;
        Ok(())
    }

    /// Creates the files and links that the host's programs need.
    fn skeleton(&self) -> Result<()> {
        self.base()?;
        for name in ["bin", "sbin", "lib", "lib64"] {
            match fs::read_link(Path::new("/").join(name)) {
                Ok(to) => {
                    fs::create_dir_all(self.root.join(&to))?;
                    symlink(to, self.root.join(name))?;
                }
                Err(_) => fs::create_dir_all(self.root.join(name))?,
            }
        }
        for name in ["/etc/ld.so.cache", "/etc/mke2fs.conf"] {
            if Path::new(name).is_file() {
                fs::copy(name, self.place(Path::new(name))?)?;
            }
        }
        Ok(())
    }

    /// Copies a program of the host to the path where it is called, with its libraries.
    pub(super) fn program(&mut self, program: &Path) -> Result<()> {
        if !self.done.insert(program.to_owned()) {
            return Ok(());
        }
        fs::copy(program, self.place(program)?)?;
        self.libraries(program)
    }

    fn libraries(&mut self, program: &Path) -> Result<()> {
        // ldd fails for scripts and static programs.
        let Ok(text) = quiet(Command::new("ldd").arg(program)) else { return Ok(()) };
        for library in text.split_whitespace().filter(|it| it.starts_with('/')) {
            let library = Path::new(library);
            if self.done.insert(library.to_owned()) {
                fs::copy(library, self.place(library)?)?;
            }
        }
        Ok(())
    }

    /// Copies a program of this repository, with its libraries.
    fn own(&mut self, program: &Path, to: &Path) -> Result<()> {
        self.stripped(program, to)?;
        self.libraries(program)
    }

    /// Copies a program of this repository without its debug information.
    pub(super) fn stripped(&self, program: &Path, to: &Path) -> Result<()> {
        let place = self.place(to)?;
        quiet(Command::new(need("strip")?).arg("-o").arg(&place).arg(program))?;
        Ok(())
    }

    /// Copies some programs of the sid root, which run with their own loader and libraries.
    fn sid(&mut self, sid: &Path) -> Result<()> {
        for name in SID {
            let script = sid.join("bin").join(name);
            let Ok(text) = fs::read_to_string(&script) else { continue };
            let words: Vec<_> = text.split('\'').filter(|it| it.starts_with('/')).collect();
            let (Some(loader), Some(libraries), Some(program)) =
                (words.first(), words.get(1), words.last())
            else {
                bail!("{} is no wrapper script", script.display());
            };
            fs::copy(&script, self.place(&script)?)?;
            let list =
                quiet(Command::new(loader).args(["--list", "--library-path", libraries, program]))?;
            let files = list.split_whitespace().filter(|it| it.starts_with('/'));
            for file in files.chain([*loader, *program]) {
                if self.done.insert(PathBuf::from(file)) {
                    fs::copy(file, self.place(Path::new(file))?)?;
                }
            }
        }
        Ok(())
    }

    /// Copies Python's own modules, without its tests and caches.
    fn python(&mut self) -> Result<()> {
        let Some(python) = installed("python3") else { return Ok(()) };
        let places = "import sysconfig; print(sysconfig.get_path('stdlib'))";
        let library = quiet(Command::new(python).args(["-c", places]))?;
        let library = Path::new(library.trim());
        let place = self.place(library)?;
        let mut tar = Command::new("sh");
        tar.args(["-c", r#"tar -C "$1" --exclude=__pycache__ --exclude=test --exclude=idlelib --exclude=tkinter \
            --exclude=ensurepip --exclude='config-*' --exclude=dist-packages -c . | tar -C "$2" -x"#, "sh"]);
        fs::create_dir_all(&place)?;
        quiet(tar.arg(library).arg(&place))?;
        // Some modules are shared libraries that load others.
        for module in fs::read_dir(library.join("lib-dynload"))?.filter_map(Result::ok) {
            self.libraries(&module.path())?;
        }
        Ok(())
    }

    /// Copies files that tests find by paths compiled in by cargo, and by the environment.
    fn files(&self) -> Result<()> {
        if let Some(data) = data() {
            for entry in fs::read_dir(&data)?.filter_map(Result::ok) {
                fs::copy(entry.path(), self.place(&entry.path())?)?;
            }
        }
        fs::create_dir_all(self.place(&target_dir()?.join("tmp/x"))?.with_file_name(""))?;
        let mut git = Command::new("git");
        git.args(["ls-files", "testdata", ":(glob)crates/*/tests/**", "crates/*/Cargo.toml"]);
        for name in quiet(git.current_dir(repository()))?.lines() {
            let from = repository().join(name);
            if from.is_file() {
                fs::copy(&from, self.place(&from)?)?;
            }
        }
        Ok(())
    }
}
