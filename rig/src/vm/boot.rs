//! Runs a guest with QEMU without KVM, reads its reports, and ends it in all cases.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::architecture::Architecture;
use super::kernels::Kernel;
use crate::Failed;
use crate::process::{need, target_dir};

/// Time limit from power-on to the first report. On an idle machine, it takes five seconds.
const BOOT: Duration = Duration::from_secs(180);

/// Additional time for a step, after the guest's own limit for it.
const GRACE: Duration = Duration::from_secs(60);

/// After a panic the guest reboots at once, which ends QEMU.
///
/// The kernel tests the timer's interrupts, and panics if there are too few in a given time ("IO-APIC + timer doesn't
/// work!"), for example because a busy host gives the guest no processor time. `no_timer_check` disables the test.
/// Source: Linux `Documentation/admin-guide/kernel-parameters.txt`, `arch/x86/kernel/apic/io_apic.c`,
/// `timer_irq_works`.
///
/// QEMU's emulated TSC differs from the other clocks on some hosts. The kernel notices this after minutes ("Marking
/// clocksource tsc unstable due to frequency skew"), and guests have hung after that. So the TSC is never used.
pub(super) const COMMAND_LINE: &str =
    "panic=-1 loglevel=6 random.trust_cpu=on no_timer_check tsc=unstable clocksource=hpet";

/// The configuration of a guest.
#[derive(Debug)]
pub(crate) struct Machine<'a> {
    pub(crate) architecture: Architecture,
    pub(crate) kernel: PathBuf,
    pub(crate) initramfs: &'a Path,
    /// Firmware for UEFI, which boots the first disk in place of the kernel above.
    pub(crate) firmware: Option<&'a Path>,
    /// Disks, in order.
    pub(crate) disks: &'a [&'a Path],
    /// Additional arguments of QEMU, for example disks of other formats, which follow `disks`.
    pub(crate) arguments: &'a [String],
    /// File that is the persistent memory `pmem0`, which no guest can change.
    pub(crate) persistent: Option<&'a Path>,
    /// Socket of a virtiofsd, whose directory has the tag `quire`.
    pub(crate) share: Option<&'a Path>,
    /// Memory in MB.
    pub(crate) memory: u32,
    /// File for the kernel's messages, which is kept for an analysis.
    pub(crate) console: PathBuf,
}

impl<'a> Machine<'a> {
    /// Returns a guest with this kernel, 1 GB of memory, and no disks. `what` distinguishes the file of its messages from
    /// those of other guests with the same kernel.
    pub(crate) fn new(kernel: &Kernel, initramfs: &'a Path, what: &str) -> Result<Self> {
        Ok(Self {
            architecture: kernel.architecture,
            kernel: kernel.image(),
            initramfs,
            firmware: None,
            disks: &[],
            arguments: &[],
            persistent: None,
            share: None,
            memory: 1024,
            console: console(kernel, what)?,
        })
    }
}

/// Returns the file for the messages of a kernel.
pub(super) fn console(kernel: &Kernel, what: &str) -> Result<PathBuf> {
    Ok(target_dir()?.join(format!("vm-{}{what}.log", kernel.release)))
}

/// A step of the plan.
#[derive(Debug)]
pub struct Step {
    pub name: String,
    pub limit: Duration,
    /// Command for the guest's shell.
    pub command: String,
    /// Whether the output is libtest's.
    pub harness: bool,
}

/// The result of a step.
#[derive(Debug)]
pub struct Outcome {
    pub code: i32,
    pub output: Vec<String>,
    pub took: Duration,
}

/// Boots the machine, whose disk contains this plan, and calls `each` with the result of each step when it ends.
///
/// A panic, a hang or a missing result is an error with the console's last lines.
pub(crate) fn run(
    machine: &Machine<'_>,
    plan: &[Step],
    each: impl FnMut(&Step, Outcome),
) -> Result<()> {
    let mut guest = start(machine)?;
    guest.steps(plan, each)?;
    guest.end()
}

/// A guest, which is killed on drop.
#[derive(Debug)]
pub struct Guest {
    qemu: Guard,
    report: Report,
}

/// A file that QEMU has opened.
#[derive(Debug)]
pub(super) struct QemuFile {
    pub(super) path: PathBuf,
    pub(super) is_writable: bool,
}

impl Guest {
    /// Whether QEMU still runs.
    pub fn is_alive(&mut self) -> Result<bool> {
        Ok(self.qemu.0.try_wait()?.is_none())
    }

    /// Returns the files that QEMU has opened.
    pub(super) fn files(&self) -> Result<Vec<QemuFile>> {
        let process = PathBuf::from(format!("/proc/{}", self.qemu.0.id()));
        let mut files = Vec::new();
        for entry in fs::read_dir(process.join("fd"))? {
            let entry = entry?;
            let Ok(path) = fs::read_link(entry.path()) else { continue };
            let about = fs::read_to_string(process.join("fdinfo").join(entry.file_name()))?;
            let flags = about.lines().find_map(|it| it.strip_prefix("flags:"));
            let flags = flags.and_then(|it| u32::from_str_radix(it.trim(), 8).ok());
            let flags = flags.context("a descriptor of QEMU has no flags")?;
            // O_RDONLY is 0, and O_PATH opens no file.
            files.push(QemuFile { path, is_writable: flags & 3 != 0 });
        }
        Ok(files)
    }

    /// Calls `each` with the results of the next steps of the plan.
    pub(super) fn steps(
        &mut self,
        steps: &[Step],
        mut each: impl FnMut(&Step, Outcome),
    ) -> Result<()> {
        for step in steps {
            let start = Instant::now();
            let what = format!("in {}", step.name);
            self.report.until(&format!("BEGIN {}", step.name), GRACE, &what)?;
            let (output, end) =
                self.report.until(&format!("END {}", step.name), step.limit + GRACE, &what)?;
            let code = end.split(' ').next().and_then(|it| it.parse().ok());
            let code =
                code.with_context(|| format!("{} ended in an unknown way: {end:?}", step.name))?;
            each(step, Outcome { code, output, took: start.elapsed() });
        }
        Ok(())
    }

    /// Waits until the guest has powered off, after the last step.
    pub(super) fn end(mut self) -> Result<()> {
        self.report.until("DONE", GRACE, "at the end")?;
        let deadline = Instant::now() + GRACE;
        while self.is_alive()? {
            if Instant::now() > deadline {
                let console = tail(&self.report.console);
                bail!(Failed(format!("the guest does not power off\n{console}")));
            }
            thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}

/// Boots the machine.
pub(super) fn start(machine: &Machine<'_>) -> Result<Guest> {
    let start = Instant::now();
    let mut qemu = Guard(qemu(machine)?.spawn().context("cannot start QEMU")?);
    let lines = lines(&mut qemu.0);
    let mut report = Report { lines, console: machine.console.clone() };
    let booted = report.until("BOOTED", BOOT, "booting")?.1;
    println!(
        "   booted Linux {} in {:.1} s",
        booted.split(' ').next().unwrap_or_default(),
        start.elapsed().as_secs_f64()
    );
    Ok(Guest { qemu, report })
}

/// Kills QEMU on drop.
#[derive(Debug)]
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        // Both fail only if QEMU has ended.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

fn qemu(machine: &Machine<'_>) -> Result<Command> {
    let architecture = machine.architecture;
    need(architecture.qemu())?;
    // If this process is killed, the guest ends as well.
    let mut command = Command::new(need("setpriv")?);
    command.args(["--pdeathsig", "KILL", architecture.qemu(), "-nodefaults", "-no-user-config"]);
    command.args(architecture.machine()).args(["-smp", "1"]);
    let room = machine.persistent.map_or("", |_| ",slots=1,maxmem=16G");
    command.arg("-m").arg(format!("{}{room}", machine.memory));
    command.args(["-display", "none", "-no-reboot", "-nic", "none"]);
    if let Some(firmware) = machine.firmware {
        command.arg("-bios").arg(firmware);
    } else {
        command.arg("-kernel").arg(&machine.kernel).arg("-initrd").arg(machine.initramfs);
        command.args(["-append", &format!("console={} {COMMAND_LINE}", architecture.console())]);
    }
    if let Some(socket) = machine.share {
        // The server reads and writes the guest's memory.
        let memory = format!("memory-backend-memfd,id=memory,size={}M,share=on", machine.memory);
        command.args(["-object", &memory, "-numa", "node,memdev=memory"]);
        command.arg("-chardev").arg(format!("socket,id=share,path={}", socket.display()));
        command.args(["-device", "vhost-user-fs-pci,chardev=share,tag=quire"]);
    }
    for disk in machine.disks {
        let disk = format!("file={},if=virtio,format=raw,cache=unsafe", value(disk));
        command.args(["-drive", &disk]);
    }
    command.args(machine.arguments);
    if let Some(file) = machine.persistent {
        let bytes = fs::metadata(file)?.len();
        let file = value(file);
        let memory = format!(
            "memory-backend-file,id=persistent,mem-path={file},size={bytes},share=on,readonly=on"
        );
        command.args(["-object", &memory, "-device", "virtio-pmem-pci,memdev=persistent"]);
    }
    command.arg("-serial").arg(format!("file:{}", machine.console.display()));
    command.args(["-chardev", "stdio,id=report,signal=off"]).args(architecture.second_port());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    Ok(command)
}

/// Returns a path as a value of an option of QEMU, which takes two commas for one that does not end the value.
fn value(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

fn lines(qemu: &mut Child) -> Receiver<String> {
    let stdout = BufReader::new(qemu.stdout.take().expect("stdout is piped"));
    let (sender, receiver) = channel();
    thread::spawn(move || {
        for line in stdout.split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line);
            if sender.send(line.trim_end_matches('\r').to_owned()).is_err() {
                break;
            }
        }
    });
    receiver
}

#[derive(Debug)]
struct Report {
    lines: Receiver<String>,
    console: PathBuf,
}

impl Report {
    /// Reads up to a line with this prefix. Returns the output before the line, and the rest of the line.
    fn until(&mut self, begin: &str, limit: Duration, what: &str) -> Result<(Vec<String>, String)> {
        let deadline = Instant::now() + limit;
        let mut output: Vec<String> = Vec::new();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let why = match self.lines.recv_timeout(left) {
                Ok(line) => {
                    if let Some(text) = line.strip_prefix('|') {
                        output.push(text.to_owned());
                    } else if let Some(rest) = line.strip_prefix(begin) {
                        return Ok((output, rest.trim().to_owned()));
                    }
                    continue;
                }
                Err(RecvTimeoutError::Timeout) => "says nothing more",
                Err(RecvTimeoutError::Disconnected) => "went down",
            };
            let last = output[output.len().saturating_sub(LAST_LINES)..].join("\n");
            let console = tail(&self.console);
            bail!(Failed(format!("the guest {why} {what}\n{last}\n-- its console:\n{console}")));
        }
    }
}

const LAST_LINES: usize = 25;

fn tail(console: &Path) -> String {
    let text = fs::read(console).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(LAST_LINES)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_never_taken_for_a_report() {
        let (sender, lines) = channel();
        for line in ["noise", "|END a 0", "|", "END a 1 7.5"] {
            sender.send(line.to_owned()).unwrap();
        }
        let mut report = Report { lines, console: PathBuf::from("/nowhere") };
        let (output, rest) = report.until("END a", GRACE, "in a").unwrap();
        assert_eq!((output, rest), (vec!["END a 0".to_owned(), String::new()], "1 7.5".to_owned()));
        let error = report.until("DONE", Duration::from_millis(1), "at the end").unwrap_err();
        assert!(error.to_string().starts_with("the guest says nothing more at the end"), "{error}");
        drop(sender);
        let error = report.until("DONE", GRACE, "at the end").unwrap_err();
        assert!(error.to_string().starts_with("the guest went down at the end"), "{error}");
    }
}
