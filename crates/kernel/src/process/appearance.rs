//! What other processes see of this one: `/proc/PID/cmdline` and `/proc/PID/environ`.
//!
//! Both files show memory of the process, in which the kernel has put the strings at the exec (proc_pid_cmdline(5)). Every
//! user of the host may read the first. A process that has forked shows its parent's strings, for as long as it lives.
#![expect(unsafe_code, reason = "the strings are reached by their addresses")]

use std::ffi::{OsStr, OsString};
use std::ops::Range;

/// Clears the environment that others see. Programs that this process starts, and `std::env`, have it as before: the
/// variables move to the heap. Call it before there is a second thread. Does nothing without `/proc`.
pub fn hide_environment() {
    let Some(Strings { environment, .. }) = Strings::own() else { return };
    // A name that begins with `=` can be had, and not be set.
    let variables =
        std::env::vars_os().filter(|(name, _)| !name.as_encoded_bytes().contains(&b'='));
    let variables: Vec<(OsString, OsString)> = variables.collect();
    // SAFETY: there is one thread, so nobody reads the environment meanwhile.
    if unsafe { libc::clearenv() } != 0 {
        return;
    }
    for (name, value) in variables {
        // SAFETY: there is one thread.
        unsafe { std::env::set_var(name, value) };
    }
    fill(&environment, &[]);
}

/// Shows these words as the command line, as far as there is room for them: the old ones give it. `std::env::args_os` has
/// no use after that. Call it before there is a second thread. Does nothing without `/proc`.
pub fn show_as(words: &[&OsStr]) {
    let Some(Strings { arguments, .. }) = Strings::own() else { return };
    let mut text = words.join(OsStr::new("\0")).into_encoded_bytes();
    // The last byte stays zero: else the kernel shows what comes after it, too.
    text.truncate(arguments.len().saturating_sub(1));
    fill(&arguments, &text);
}

/// Where the kernel has put the strings.
struct Strings {
    arguments: Range<usize>,
    environment: Range<usize>,
}

impl Strings {
    /// Source: proc_pid_stat(5), fields 48 to 51.
    fn own() -> Option<Self> {
        let stat = super::stat_of(rustix::process::getpid())?;
        let fields: Vec<usize> =
            stat.split_whitespace().skip(45).map_while(|it| it.parse().ok()).collect();
        let [arguments_start, arguments_end, start, end, ..] = fields[..] else { return None };
        let (arguments, environment) = (arguments_start..arguments_end, start..end);
        // All in one place, the environment last, or it is not what is meant.
        let is_sound = arguments.start > 0
            && arguments.start < arguments.end
            && arguments.end <= environment.start
            && environment.start <= environment.end;
        is_sound.then_some(Self { arguments, environment })
    }
}

/// Writes a text, which must fit, and zeros behind it.
fn fill(place: &Range<usize>, text: &[u8]) {
    for (index, address) in place.clone().enumerate() {
        let byte = text.get(index).copied().unwrap_or(0);
        let to = std::ptr::with_exposed_provenance_mut::<u8>(address);
        // SAFETY: the kernel has put strings there, for this process to write. No reference to them is left: `std` makes a
        // copy of each when it is asked, and zeros end strings.
        unsafe { to.write_volatile(byte) };
    }
}
