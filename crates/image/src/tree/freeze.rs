//! Turns the parts of a builder into a finished tree.

use super::frozen::Tree;
use super::intern::Strings;
use super::raw::{Kind, NO_OWNER, OWNER, REMOVED, RawEntry, RawInode, STATED_NLINK};

/// Sorts entries, counts links and inodes with a name, and decides which name owns each inode.
pub(super) fn freeze(
    mut inodes: Vec<RawInode>,
    mut entries: Vec<RawEntry>,
    names: Strings,
    strings: Strings,
    xattrs: Strings,
) -> Tree {
    entries.retain(|entry| entry.parent != REMOVED);
    let mut entries = by_directory(&mut inodes, entries);
    for siblings in entries.chunk_by_mut(|a, b| a.parent == b.parent) {
        let by_name = |a: &RawEntry, b: &RawEntry| names.get(a.name).cmp(names.get(b.name));
        // Most sources list siblings in order.
        if !siblings.is_sorted_by(|a, b| by_name(a, b).is_lt()) {
            siblings.sort_unstable_by(by_name);
        }
    }

    let mut owners = vec![NO_OWNER; inodes.len()];
    let mut names_of = vec![0_u32; inodes.len()];
    let mut reached = 1;
    let mut open = vec![0_u32];
    let mut contested = Vec::new();
    while let Some(directory) = open.pop() {
        let RawInode { first, second, .. } = inodes[directory as usize];
        let mut subdirectories = 0;
        for at in first..first + second {
            let entry = entries[at as usize];
            let inode = entry.inode() as usize;
            if inodes[inode].kind == Kind::Directory {
                subdirectories += 1;
                open.push(entry.inode());
            }
            names_of[inode] += 1;
            match names_of[inode] {
                1 => {
                    reached += 1;
                    owners[inode] = at;
                }
                2 => contested.push(entry.inode()),
                _ => {}
            }
        }
        inodes[directory as usize].nlink = 2 + subdirectories;
    }
    for (inode, names) in inodes.iter_mut().zip(&names_of) {
        if inode.kind != Kind::Directory && inode.flags & STATED_NLINK == 0 {
            inode.nlink = *names;
        }
    }
    let mut tree = Tree { inodes, entries, owners, reached, names, strings, xattrs };
    if !contested.is_empty() {
        tree.settle(&contested);
    }
    tree
}

/// Groups the entries by directory in their existing order, and sets each directory's `first` and `second` to its
/// range.
fn by_directory(inodes: &mut Vec<RawInode>, entries: Vec<RawEntry>) -> Vec<RawEntry> {
    inodes.shrink_to_fit();
    for inode in &mut *inodes {
        if inode.kind == Kind::Directory {
            (inode.first, inode.second) = (0, 0);
        }
    }
    for entry in &entries {
        inodes[entry.parent as usize].second += 1;
    }
    let mut end = 0;
    for inode in &mut *inodes {
        if inode.kind == Kind::Directory {
            inode.first = end;
            end += inode.second;
        }
    }
    let mut sorted = vec![RawEntry { parent: 0, name: 0, target: 0 }; entries.len()];
    for entry in entries {
        let parent = &mut inodes[entry.parent as usize];
        sorted[parent.first as usize] = entry;
        parent.first += 1;
    }
    for inode in inodes {
        if inode.kind == Kind::Directory {
            inode.first -= inode.second;
        }
    }
    sorted
}

impl Tree {
    /// Chooses the owning name of each inode that has several: the first name that claims ownership, in the byte
    /// order of whole paths, or else the first name.
    fn settle(&mut self, contested: &[u32]) {
        #[derive(Clone, Copy, PartialEq)]
        enum Owner {
            Known,
            NotMet,
            First,
            Claimed,
        }
        let mut owners = vec![Owner::Known; self.inodes.len()];
        for inode in contested {
            owners[*inode as usize] = Owner::NotMet;
        }
        // In the paths below a directory, a slash follows the directory's name, so the name is compared with that
        // slash.
        let name = |at: u32| {
            let entry = self.entries[at as usize];
            let below = self.inodes[entry.inode() as usize].kind == Kind::Directory;
            self.names.get(entry.name).iter().chain(below.then_some(&b'/'))
        };
        let children = |directory: u32| {
            let RawInode { first, second, .. } = self.inodes[directory as usize];
            let mut entries: Vec<u32> = (first..first + second).collect();
            entries.sort_by(|a, b| name(*b).cmp(name(*a)));
            entries
        };
        let mut open = children(0);
        while let Some(at) = open.pop() {
            let entry = self.entries[at as usize];
            let inode = entry.inode();
            if self.inodes[inode as usize].kind == Kind::Directory {
                open.extend(children(inode));
                continue;
            }
            let claims = entry.target & OWNER != 0;
            let owner = &mut owners[inode as usize];
            *owner = match *owner {
                Owner::NotMet if !claims => Owner::First,
                Owner::NotMet | Owner::First if claims => Owner::Claimed,
                Owner::NotMet | Owner::Known | Owner::First | Owner::Claimed => continue,
            };
            self.owners[inode as usize] = at;
        }
    }
}
