//! The windows of a group's spans, as bytes. They are compressed where they are kept.

use super::GROUP;
use crate::gzip::{Checkpoint, WINDOW, Window};

/// The groups of checkpoints, as [`GROUP`] says: the first number of each, and its windows' bytes.
#[must_use]
pub fn encode_windows(checkpoints: &[Checkpoint]) -> Vec<(u32, Vec<u8>)> {
    let mut groups: Vec<(u32, Vec<u8>)> = Vec::new();
    let mut current = None;
    for (number, checkpoint) in (0..).zip(checkpoints) {
        let group = checkpoint.packed.checked_div(GROUP);
        if current != group || groups.is_empty() {
            current = group;
            groups.push((number, Vec::new()));
        }
        if let Some((_, bytes)) = groups.last_mut() {
            encode(&checkpoint.window, bytes);
        }
    }
    groups
}

/// The number of runs. Each run's distance from the end of the one before, and its length. Then the bytes of all.
fn encode(window: &Window, bytes: &mut Vec<u8>) {
    let mut put = |mut number: usize| {
        while number >= 0x80 {
            bytes.push(0x80 | number.to_le_bytes()[0]);
            number >>= 7;
        }
        bytes.push(number.to_le_bytes()[0]);
    };
    put(window.runs().len());
    let mut end = 0;
    for run in window.runs() {
        put(usize::from(run.start.saturating_sub(end)));
        put(run.len());
        end = run.end;
    }
    bytes.extend(window.bytes());
}

/// The windows of `spans` spans. `None` for bytes that [`encode_windows`] does not make.
#[must_use]
pub fn decode_windows(bytes: &[u8], spans: usize) -> Option<Vec<Window>> {
    let mut rest = bytes;
    let windows = (0..spans).map(|_| decode(&mut rest)).collect::<Option<Vec<_>>>()?;
    rest.is_empty().then_some(windows)
}

fn decode(rest: &mut &[u8]) -> Option<Window> {
    let mut runs = Vec::new();
    let mut length: usize = 0;
    let mut end: u16 = 0;
    for _ in 0..number(rest)? {
        let start = end.checked_add(number(rest)?)?;
        end = start.checked_add(number(rest)?)?;
        length = length.checked_add(usize::from(end.checked_sub(start)?))?;
        runs.push(start..end);
    }
    let (bytes, behind) = rest.split_at_checked(length).filter(|_| length <= WINDOW)?;
    *rest = behind;
    Window::of_parts(runs, bytes.to_vec())
}

/// LEB128: seven bits a byte, the lowest first; each number in its shortest way only.
fn number(rest: &mut &[u8]) -> Option<u16> {
    let mut number: u32 = 0;
    for shift in [0, 7, 14] {
        let (byte, behind) = rest.split_first()?;
        *rest = behind;
        number |= u32::from(byte & 0x7f) << shift;
        if *byte < 0x80 {
            return u16::try_from(number).ok().filter(|_| *byte > 0 || shift == 0);
        }
    }
    None
}
