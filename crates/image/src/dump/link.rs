//! Hard links whose targets are found once all lines are read.

use std::hash::BuildHasher as _;

use hashbrown::{DefaultHashBuilder, HashTable};

use super::{ParseError, Reason};
use crate::tree::{Builder, InodeId, Link, TreeError, check_name, components};

/// The hard links of a dump. They have no entry in the tree yet.
#[derive(Default)]
pub(super) struct Links {
    links: Vec<Pending>,
    /// The names and targets.
    text: Vec<u8>,
    /// Links by directory and name.
    index: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

struct Pending {
    line: u64,
    directory: InodeId,
    /// Where in `text` its name begins, its name ends and its target begins, its target ends.
    start: usize,
    middle: usize,
    end: usize,
}

impl Links {
    fn name(&self, at: u32) -> &[u8] {
        let link = &self.links[at as usize];
        &self.text[link.start..link.middle]
    }

    fn target(&self, at: u32) -> &[u8] {
        let link = &self.links[at as usize];
        &self.text[link.middle..link.end]
    }

    fn hash(hasher: &DefaultHashBuilder, directory: InodeId, name: &[u8]) -> u64 {
        hasher.hash_one((directory, name))
    }

    /// Which link stands in `directory` under `name`.
    pub(super) fn find(&self, directory: InodeId, name: &[u8]) -> Option<u32> {
        if self.links.is_empty() {
            return None;
        }
        let found = self.index.find(Self::hash(&self.hasher, directory, name), |&at| {
            self.links[at as usize].directory == directory && self.name(at) == name
        });
        found.copied()
    }

    /// Takes a link that will stand in `directory` under `name`.
    pub(super) fn add(
        &mut self,
        builder: &Builder,
        line: u64,
        (directory, name): (InodeId, &[u8]),
        target: &[u8],
    ) -> Result<(), TreeError> {
        check_name(name)?;
        if builder.lookup(directory, name).is_some() || self.find(directory, name).is_some() {
            return Err(TreeError::Exists(name.to_vec()));
        }
        let at =
            u32::try_from(self.links.len()).map_err(|_full| TreeError::TooLarge("2^32 names"))?;
        let start = self.text.len();
        self.text.extend_from_slice(name);
        let middle = self.text.len();
        self.text.extend_from_slice(target);
        self.links.push(Pending { line, directory, start, middle, end: self.text.len() });
        let Self { links, text, index, hasher } = self;
        index.insert_unique(Self::hash(hasher, directory, name), at, |&at| {
            let Pending { directory, start, middle, .. } = links[at as usize];
            Self::hash(hasher, directory, &text[start..middle])
        });
        Ok(())
    }

    /// Puts all links into the tree.
    pub(super) fn resolve(&self, builder: &mut Builder) -> Result<(), ParseError> {
        let mut found: Vec<Option<InodeId>> = vec![None; self.links.len()];
        let mut trail = Vec::new();
        for (first, link) in (0_u32..).zip(&self.links) {
            let line = link.line;
            let wrong = |source| ParseError::Line { line, source };
            trail.clear();
            let mut at = first;
            let inode = loop {
                if let Some(inode) = found[at as usize] {
                    break inode;
                }
                trail.push(at);
                if trail.len() > self.links.len() {
                    return Err(wrong(Reason::LinkLoop));
                }
                match self.step(builder, at) {
                    Step::Inode(inode) => break inode,
                    Step::Link(next) => at = next,
                    Step::Nowhere => {
                        return Err(wrong(Reason::NoTarget(self.target(at).to_vec())));
                    }
                }
            };
            if builder.is_directory(inode) {
                return Err(wrong(Reason::LinkToDirectory));
            }
            for at in &trail {
                found[*at as usize] = Some(inode);
            }
        }
        for ((at, link), inode) in (0_u32..).zip(&self.links).zip(found) {
            let inode = inode.expect("each link was followed");
            builder
                .insert(link.directory, self.name(at), inode, Link::Equal)
                .map_err(|source| ParseError::Line { line: link.line, source: source.into() })?;
        }
        Ok(())
    }

    /// Where a link leads.
    fn step(&self, builder: &Builder, at: u32) -> Step {
        let mut here = Step::Inode(InodeId::ROOT);
        for name in components(self.target(at)) {
            let Step::Inode(directory) = here else { return Step::Nowhere };
            here = match builder.lookup(directory, name) {
                Some(inode) => Step::Inode(inode),
                None => self.find(directory, name).map_or(Step::Nowhere, Step::Link),
            };
        }
        here
    }
}

enum Step {
    Inode(InodeId),
    Link(u32),
    Nowhere,
}
