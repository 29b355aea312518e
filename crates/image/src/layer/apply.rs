//! Applies a layer to the tree of the lower layers.

use super::follow::{self, Blocked, FollowedPath, Missing, Steps};
use super::{Hidden, Layer, LayerError, Pending, Role, Tally, role};
use crate::tree::{Builder, Copied, InodeId, Link, TreeError, components};

/// The target of a hard link.
#[derive(Debug, Clone, Copy)]
enum Target {
    /// An inode of the lower layers.
    Lower(InodeId),
    /// An inode of the link's own layer.
    Own(InodeId),
}

impl Layer {
    /// Applies the layer to `lower`, the tree of the lower layers, or makes it the lowest layer. The time is
    /// proportional to the number of this layer's entries, unless the layer hides whole directories.
    ///
    /// # Errors
    /// [`LayerError`] with the entry that cannot be applied.
    pub fn onto(self, lower: Option<Builder>) -> Result<Builder, LayerError> {
        self.onto_until(lower, &|| false)
    }

    /// Applies the layer like [`onto`](Self::onto), unless `is_stopped` returns true. `is_stopped` is called before
    /// each entry.
    ///
    /// # Errors
    /// [`LayerError`]; [`LayerError::Stopped`] if `is_stopped` returned true.
    pub fn onto_until(
        mut self,
        lower: Option<Builder>,
        is_stopped: IsStopped<'_>,
    ) -> Result<Builder, LayerError> {
        match lower {
            None => {
                let links = self.targets(&mut Builder::new(), is_stopped)?;
                let links: Vec<_> = links
                    .into_iter()
                    .map(|(placeholder, target)| match target {
                        Target::Own(inode) | Target::Lower(inode) => (placeholder, inode),
                    })
                    .collect();
                self.tree.relink(&links);
                let entries = Entries::from_builder(&self.tree);
                self.account(entries.laid, entries.below_replaced)?;
                Ok(self.tree)
            }
            Some(mut lower) => {
                let links = self.targets(&mut lower, is_stopped)?;
                self.hide(&mut lower, is_stopped)?;
                let merge = Merge::new(&mut self.tree, &mut lower, &links, &mut self.steps)?;
                let laid = merge.all(is_stopped)?;
                self.account(laid, Entries::from_builder(&self.tree).below_replaced)?;
                Ok(lower)
            }
        }
    }

    /// Checks that every entry that was added is accounted for: `laid` entries are names of the tree now, and
    /// `below_replaced` are below directories that this layer replaced.
    fn account(&self, laid: u64, below_replaced: u64) -> Result<(), LayerError> {
        let Tally { given, hide, replaced } = self.tally;
        let replaced = replaced + below_replaced;
        if laid + hide + replaced == given {
            return Ok(());
        }
        Err(LayerError::Unaccounted { given, laid, hide, replaced })
    }

    /// Finds the target of each placeholder: first in the lower layers, then among later entries of this layer.
    fn targets(
        &mut self,
        lower: &mut Builder,
        is_stopped: IsStopped<'_>,
    ) -> Result<Vec<(InodeId, Target)>, LayerError> {
        if self.pending.is_empty() {
            return Ok(Vec::new());
        }
        // A later entry of the same path may have replaced the link.
        let named = named(&self.tree);
        self.pending.retain(|pending| named[pending.placeholder.index()]);
        let mut known = vec![None; self.tree.inode_bound()];
        for pending in &self.pending {
            go_on(is_stopped)?;
            let target = match find_link_target(lower, pending, &mut self.steps)? {
                Some(found) => Target::Lower(found),
                None => {
                    let found = find_link_target(&mut self.tree, pending, &mut self.steps)?;
                    Target::Own(found.ok_or_else(|| pending.leads_nowhere())?)
                }
            };
            known[pending.placeholder.index()] = Some(target);
        }
        // Resolve links to links. Each chain is followed once.
        let mut chain = Vec::new();
        for pending in &self.pending {
            let mut target = Target::Own(pending.placeholder);
            while let Target::Own(inode) = target
                && let Some(next) = known[inode.index()]
            {
                chain.push(inode);
                if chain.len() > self.pending.len() {
                    return Err(pending.leads_nowhere());
                }
                target = next;
            }
            for inode in chain.drain(..) {
                known[inode.index()] = Some(target);
            }
        }
        let targets = self.pending.iter().map(|pending| {
            let target = known[pending.placeholder.index()];
            (pending.placeholder, target.expect("found above"))
        });
        Ok(targets.collect())
    }

    /// Removes the names that this layer hides. All paths are resolved before any name is removed.
    fn hide(&mut self, lower: &mut Builder, is_stopped: IsStopped<'_>) -> Result<(), LayerError> {
        let mut names = Vec::new();
        let mut cleared = Vec::new();
        for hidden in &self.hidden {
            let (Hidden::Name { directory: at, .. } | Hidden::Children(at)) = hidden;
            go_on(is_stopped)?;
            let found = match follow::directory(lower, at, Missing::Stop, &mut self.steps) {
                Ok(FollowedPath::Directory(found)) => found,
                Err(blocked @ Blocked::Steps { .. }) => return Err(blocked.into_error(at)),
                // A path that does not exist, or is a symlink loop, hides nothing.
                Ok(FollowedPath::Missing) | Err(_) => continue,
            };
            if replaces_symlink(&self.tree, lower, at) {
                continue;
            }
            match hidden {
                Hidden::Name { name, .. } => names.push((found, name)),
                Hidden::Children(_) => cleared.push(found),
            }
        }
        for (directory, name) in names {
            lower.remove(directory, name);
        }
        lower.clear(&cleared);
        Ok(())
    }
}

/// A function that returns whether the caller wants to stop.
type IsStopped<'a> = &'a dyn Fn() -> bool;

fn go_on(is_stopped: IsStopped<'_>) -> Result<(), LayerError> {
    if is_stopped() { Err(LayerError::Stopped) } else { Ok(()) }
}

impl Pending {
    fn leads_nowhere(&self) -> LayerError {
        LayerError::LinkTarget { path: self.path.clone(), target: self.target.clone() }
    }
}

/// Finds the target of a link in `tree`.
fn find_link_target(
    tree: &mut Builder,
    pending: &Pending,
    steps: &mut Steps,
) -> Result<Option<InodeId>, LayerError> {
    let Role::Entry(directory, name) = role(&pending.target)? else { return Ok(None) };
    let directory = match follow::directory(tree, directory, Missing::Stop, steps) {
        Ok(FollowedPath::Directory(directory)) => directory,
        Err(blocked @ Blocked::Steps { .. }) => return Err(blocked.into_error(&pending.path)),
        Ok(FollowedPath::Missing) | Err(_) => return Ok(None),
    };
    let found = tree.lookup(directory, name);
    if found.is_some_and(|found| tree.is_directory(found)) {
        let (path, target) = (pending.path.clone(), pending.target.clone());
        return Err(LayerError::LinkToDirectory { path, target });
    }
    Ok(found)
}

/// Returns, for each inode, whether it has a name that can be reached from the root.
fn named(tree: &Builder) -> Vec<bool> {
    let mut named = vec![false; tree.inode_bound()];
    named[InodeId::ROOT.index()] = true;
    for (directory, _, inode) in tree.names() {
        if named[directory.index()] {
            named[inode.index()] = true;
        }
    }
    named
}

/// Whether `upper` has an entry for the first component of `directory` that is not a directory in `lower`. The path
/// then no longer leads through `lower`'s symlink.
fn replaces_symlink(upper: &Builder, lower: &Builder, directory: &[u8]) -> bool {
    let (mut own, mut there) = (Some(InodeId::ROOT), InodeId::ROOT);
    for name in components(directory).filter(|name| *name != b".") {
        own = own.and_then(|own| upper.lookup(own, name));
        match lower.lookup(there, name) {
            Some(next) if lower.is_directory(next) => there = next,
            _ => return own.is_some_and(|own| !upper.is_implicit(own)),
        }
    }
    false
}

/// Numbers of a layer's entries that are in its tree. Implicit directories are not counted.
struct Entries {
    /// Entries that the root reaches, including an entry for the root itself.
    laid: u64,
    /// Entries below a directory that a later entry replaced.
    below_replaced: u64,
}

impl Entries {
    fn from_builder(tree: &Builder) -> Self {
        let named = named(tree);
        let root = u64::from(!tree.is_implicit(InodeId::ROOT));
        let mut entries = Self { laid: root, below_replaced: 0 };
        for (directory, _, inode) in tree.names() {
            let count = u64::from(!tree.is_implicit(inode));
            if named[directory.index()] {
                entries.laid += count;
            } else {
                entries.below_replaced += count;
            }
        }
        entries
    }
}

/// A name of the upper tree.
#[derive(Clone, Copy)]
struct Name<'a> {
    directory: InodeId,
    name: &'a [u8],
    inode: InodeId,
}

/// The result of laying a name.
enum Outcome {
    Laid,
    /// The path leads through a file or a dangling symlink of the lower layers. The name is applied after the other
    /// names, which may add the symlink's target.
    Postponed,
}

/// Copies all names of `upper` to `lower`.
struct Merge<'a> {
    upper: &'a Builder,
    lower: &'a mut Builder,
    copied: Copied,
    paths: Paths<'a>,
    /// Whether paths of the layer lead through symlinks of lower layers. If so, two of its paths may be the same file,
    /// and applying one may remove a directory that is on the other path.
    is_through_symlinks: bool,
    /// Number of directories and symlinks removed from `lower`.
    removed: u32,
    /// For each inode of `upper`, the value of `removed` when its path was last resolved in `lower`.
    resolved: Vec<u32>,
    steps: &'a mut Steps,
}

impl<'a> Merge<'a> {
    fn new(
        upper: &'a mut Builder,
        lower: &'a mut Builder,
        links: &[(InodeId, Target)],
        steps: &'a mut Steps,
    ) -> Result<Self, LayerError> {
        let mut copied = Copied::new(upper);
        // This links the placeholders again whose target is in `upper`. A target in `lower` is recorded as if it had
        // been copied.
        let mut stands_for = Vec::new();
        for (placeholder, target) in links {
            match target {
                Target::Lower(inode) => copied.is_now(*placeholder, *inode),
                Target::Own(inode) => stands_for.push((*placeholder, *inode)),
            }
        }
        upper.relink(&stands_for);
        let upper = &*upper;
        if !upper.is_implicit(InodeId::ROOT) {
            let described = lower.copy_metadata(upper, InodeId::ROOT, InodeId::ROOT, &mut copied);
            described.map_err(|source| LayerError::Entry { path: b"/".to_vec(), source })?;
        }
        copied.is_now(InodeId::ROOT, InodeId::ROOT);
        let resolved = vec![0; upper.inode_bound()];
        let paths = Paths::new(upper);
        let (is_through_symlinks, removed) = (false, 0);
        Ok(Self { upper, lower, copied, paths, is_through_symlinks, removed, resolved, steps })
    }

    /// Copies all names, and returns the number of entries laid. Implicit directories are not counted.
    fn all(mut self, is_stopped: IsStopped<'_>) -> Result<u64, LayerError> {
        let upper = self.upper;
        let named = named(upper);
        let mut laid = u64::from(!upper.is_implicit(InodeId::ROOT));
        let mut postponed = Vec::new();
        let mut is_postponed = vec![false; upper.inode_bound()];
        for (directory, name, inode) in upper.names() {
            go_on(is_stopped)?;
            // Entries below directories that this layer itself has replaced later are skipped.
            if !named[directory.index()] {
                continue;
            }
            let name = Name { directory, name, inode };
            if is_postponed[directory.index()] {
                is_postponed[inode.index()] = upper.is_directory(inode);
                postponed.push(name);
                continue;
            }
            match self.lay(name, IfBlocked::Postpone)? {
                Outcome::Laid => laid += u64::from(!upper.is_implicit(inode)),
                Outcome::Postponed => {
                    is_postponed[inode.index()] = true;
                    postponed.push(name);
                }
            }
        }
        for name in postponed {
            go_on(is_stopped)?;
            match self.lay(name, IfBlocked::Replace)? {
                Outcome::Laid => laid += u64::from(!upper.is_implicit(name.inode)),
                Outcome::Postponed => return Err(LayerError::Lost(self.path(name))),
            }
        }
        Ok(laid)
    }

    fn lay(&mut self, name: Name<'a>, blocked: IfBlocked) -> Result<Outcome, LayerError> {
        let parent = self.parent(name)?;
        let removed = self.removed;
        let there = self.lower.lookup(parent, name.name);
        if let Some(there) = there
            && self.upper.is_directory(name.inode)
        {
            let is_implicit = self.upper.is_implicit(name.inode);
            if self.lower.is_directory(there) {
                self.is_now(name.inode, there, removed);
                if !is_implicit {
                    let Self { upper, lower, copied, .. } = self;
                    let described = lower.copy_metadata(upper, name.inode, there, copied);
                    described.map_err(|source| self.failed(name, source))?;
                }
                return Ok(Outcome::Laid);
            }
            if is_implicit {
                let path = self.paths.path_of(name.inode);
                match (self.follow(&path), blocked) {
                    (Ok(FollowedPath::Directory(found)), _) => {
                        self.is_through_symlinks = true;
                        self.is_now(name.inode, found, removed);
                        return Ok(Outcome::Laid);
                    }
                    (Err(error @ (Blocked::Tree(_) | Blocked::Steps { .. })), _) => {
                        return Err(error.into_error(&path));
                    }
                    (_, IfBlocked::Postpone) => return Ok(Outcome::Postponed),
                    // As in an overlay, the upper layer's directory replaces the name.
                    (_, IfBlocked::Replace) => {}
                }
            }
        }
        if let Some(old) = there {
            self.lower.remove(parent, name.name);
            if self.lower.is_directory(old) || self.lower.symlink_target(old).is_some() {
                self.removed = self.removed.saturating_add(1);
            }
        }
        let Self { upper, lower, copied, .. } = self;
        let here = lower.copy_inode(upper, name.inode, copied);
        let here = here.map_err(|source| self.failed(name, source))?;
        // The removed name may have been part of this path, so record the count from before the removal.
        self.is_now(name.inode, here, removed);
        let inserted = self.lower.insert(parent, name.name, here, Link::Equal);
        inserted.map_err(|source| self.failed(name, source))?;
        Ok(Outcome::Laid)
    }

    /// Returns the directory of the lower tree that gets the name.
    fn parent(&mut self, name: Name<'a>) -> Result<InodeId, LayerError> {
        let directory = name.directory;
        let Some(parent) = self.copied.get(directory) else {
            return Err(LayerError::Lost(self.path(name)));
        };
        let is_current = self.resolved[directory.index()] == self.removed;
        if is_current || !self.is_through_symlinks || directory == InodeId::ROOT {
            return Ok(parent);
        }
        let path = self.paths.path_of(directory);
        match self.follow(&path) {
            Ok(FollowedPath::Directory(found)) => {
                self.is_now(directory, found, self.removed);
                Ok(found)
            }
            Ok(FollowedPath::Missing) => Err(LayerError::ParentNotDirectory(path)),
            Err(blocked) => Err(blocked.into_error(&path)),
        }
    }

    /// Finds a directory of the layer in the lower tree. The components of the path itself also count as steps,
    /// because one path may be resolved many times.
    fn follow(&mut self, path: &[u8]) -> Result<FollowedPath, Blocked> {
        self.steps.take(path)?;
        follow::directory(self.lower, path, Missing::Stop, self.steps)
    }

    fn is_now(&mut self, inode: InodeId, here: InodeId, removed: u32) {
        self.copied.is_now(inode, here);
        self.resolved[inode.index()] = removed;
    }

    fn path(&mut self, name: Name<'_>) -> Vec<u8> {
        let mut path = self.paths.path_of(name.directory);
        path.extend_from_slice(name.name);
        path
    }

    fn failed(&mut self, name: Name<'_>, source: TreeError) -> LayerError {
        LayerError::Entry { path: self.path(name), source }
    }
}

/// The action if a file or symlink of the lower layers blocks a path.
#[derive(Clone, Copy)]
enum IfBlocked {
    Postpone,
    /// Replaces the file or symlink with a directory.
    Replace,
}

/// The paths of a builder's directories, computed at the first use.
struct Paths<'a> {
    tree: &'a Builder,
    /// For each inode, its parent directory and its name in that directory.
    above: Vec<Option<(InodeId, &'a [u8])>>,
}

impl<'a> Paths<'a> {
    const fn new(tree: &'a Builder) -> Self {
        Self { tree, above: Vec::new() }
    }

    /// Returns the path of a directory, with a trailing slash and without a leading one.
    fn path_of(&mut self, mut directory: InodeId) -> Vec<u8> {
        if self.above.is_empty() {
            self.above.resize(self.tree.inode_bound(), None);
            for (parent, name, inode) in self.tree.names() {
                if self.tree.is_directory(inode) {
                    self.above[inode.index()] = Some((parent, name));
                }
            }
        }
        let mut names = Vec::new();
        while let Some((parent, name)) = self.above[directory.index()] {
            names.push(name);
            directory = parent;
        }
        names.iter().rev().flat_map(|name| [name, b"/".as_slice()]).flatten().copied().collect()
    }
}
