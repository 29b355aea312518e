//! Resolves hard links, whose targets are looked up after all lines are parsed.

use std::hash::BuildHasher as _;

use hashbrown::{DefaultHashBuilder, HashTable};

use super::{ParseError, Reason};
use crate::tree::{Builder, InodeId, Link, TreeError, check_name, components};

/// The hard links of a dump, which have no entries in the tree yet.
#[derive(Default)]
pub(super) struct Links {
    links: Vec<Pending>,
    /// The name and the target of each link, concatenated.
    text: Vec<u8>,
    /// Indexes of `links`, by directory and name.
    index: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

struct Pending {
    line: u64,
    directory: InodeId,
    /// Offsets in `text`: the start of the name, the end of the name and start of the target, and the target's end.
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

    /// Returns the index of the link `name` in `directory`.
    pub(super) fn index_of(&self, directory: InodeId, name: &[u8]) -> Option<u32> {
        if self.links.is_empty() {
            return None;
        }
        let found = self.index.find(Self::hash(&self.hasher, directory, name), |&at| {
            self.links[at as usize].directory == directory && self.name(at) == name
        });
        found.copied()
    }

    /// Records a link `name` in `directory`.
    pub(super) fn add(
        &mut self,
        builder: &Builder,
        line: u64,
        directory: InodeId,
        name: &[u8],
        target: &[u8],
    ) -> Result<(), TreeError> {
        check_name(name)?;
        if builder.lookup(directory, name).is_some() || self.index_of(directory, name).is_some() {
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

    /// Adds all links to the tree.
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

    /// Looks up the target of a link.
    fn step(&self, builder: &Builder, at: u32) -> Step {
        let mut here = Step::Inode(InodeId::ROOT);
        for name in components(self.target(at)) {
            let Step::Inode(directory) = here else { return Step::Nowhere };
            here = match builder.lookup(directory, name) {
                Some(inode) => Step::Inode(inode),
                None => self.index_of(directory, name).map_or(Step::Nowhere, Step::Link),
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
