//! Laying a layer over those below.

use super::follow::{self, Missing, Place};
use super::{Hidden, Layer, LayerError, Pending, Role, role};
use crate::tree::{Builder, Copied, InodeId, Link, TreeError, components};

/// What a hard link stands for.
#[derive(Debug, Clone, Copy)]
enum Target {
    /// An inode of the lower layers.
    Lower(InodeId),
    /// An inode of the link's own layer.
    Own(InodeId),
}

impl Layer {
    /// Lays the layer over `lower`, the tree of the layers below, or makes it the lowest layer. Takes time in
    /// proportion to this layer's entries alone, unless it hides whole directories.
    ///
    /// # Errors
    /// [`LayerError`] with the entry that cannot be laid.
    pub fn onto(mut self, lower: Option<Builder>) -> Result<Builder, LayerError> {
        match lower {
            None => {
                let links = self.targets(&mut Builder::new())?;
                let links: Vec<_> = links
                    .into_iter()
                    .map(|(placeholder, target)| match target {
                        Target::Own(inode) | Target::Lower(inode) => (placeholder, inode),
                    })
                    .collect();
                self.tree.relink(&links);
                Ok(self.tree)
            }
            Some(mut lower) => {
                let links = self.targets(&mut lower)?;
                self.hide(&mut lower);
                merge(&mut self.tree, &mut lower, &links)?;
                Ok(lower)
            }
        }
    }

    /// What each placeholder stands for: the lower layers' first, then later entries of this layer.
    fn targets(&mut self, lower: &mut Builder) -> Result<Vec<(InodeId, Target)>, LayerError> {
        if self.pending.is_empty() {
            return Ok(Vec::new());
        }
        // A later entry of the same path may have taken the link's place.
        let named = named(&self.tree);
        self.pending.retain(|pending| named[pending.placeholder.index()]);
        let mut known = vec![None; self.tree.inode_bound()];
        for pending in &self.pending {
            let target = match find(lower, pending)? {
                Some(found) => Target::Lower(found),
                None => Target::Own(
                    find(&mut self.tree, pending)?.ok_or_else(|| pending.leads_nowhere())?,
                ),
            };
            known[pending.placeholder.index()] = Some(target);
        }
        // Links to links: each chain is walked once.
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

    /// Removes what this layer hides. All paths are resolved before anything is removed.
    fn hide(&self, lower: &mut Builder) {
        let mut names = Vec::new();
        let mut cleared = Vec::new();
        for hidden in &self.hidden {
            let (Hidden::Name { directory: at, .. } | Hidden::Children(at)) = hidden;
            // A path that leads nowhere, or round in circles, hides nothing.
            let Ok(Place::Directory(found)) = follow::directory(lower, at, Missing::Stop) else {
                continue;
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
    }
}

impl Pending {
    fn leads_nowhere(&self) -> LayerError {
        LayerError::LinkTarget { path: self.path.clone(), target: self.target.clone() }
    }
}

/// What the link names in `tree`, if it names anything.
fn find(tree: &mut Builder, pending: &Pending) -> Result<Option<InodeId>, LayerError> {
    let Role::Entry(directory, name) = role(&pending.target)? else { return Ok(None) };
    let Ok(Place::Directory(directory)) = follow::directory(tree, directory, Missing::Stop) else {
        return Ok(None);
    };
    let found = tree.lookup(directory, name);
    if found.is_some_and(|found| tree.is_directory(found)) {
        let (path, target) = (pending.path.clone(), pending.target.clone());
        return Err(LayerError::LinkToDirectory { path, target });
    }
    Ok(found)
}

/// By inode: whether the root reaches a name of it.
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

/// Whether `upper` describes anew what is a symlink of `lower` on the way to `directory`: then the path is no longer
/// the symlink's.
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

/// Copies all names of `upper` to `lower`.
fn merge(
    upper: &mut Builder,
    lower: &mut Builder,
    links: &[(InodeId, Target)],
) -> Result<(), LayerError> {
    let mut copied = Copied::new(upper);
    let tree_error = |source| LayerError::Entry { path: b"/".to_vec(), source };
    // What a placeholder stands for in `upper`; what it stands for in `lower` is as good as copied.
    let mut stands_for = Vec::new();
    for (placeholder, target) in links {
        match target {
            Target::Lower(inode) => copied.is_now(*placeholder, *inode),
            Target::Own(inode) => stands_for.push((*placeholder, *inode)),
        }
    }
    upper.relink(&stands_for);
    if !upper.is_implicit(InodeId::ROOT) {
        lower
            .copy_metadata(upper, InodeId::ROOT, InodeId::ROOT, &mut copied)
            .map_err(tree_error)?;
    }
    let mut paths = Paths::new(upper);
    for (directory, name, inode) in upper.names() {
        let parent = match directory {
            InodeId::ROOT => InodeId::ROOT,
            // Directories that this layer itself replaced later were not copied.
            _ => match copied.get(directory) {
                Some(parent) => parent,
                None => continue,
            },
        };
        let failed = |source: TreeError, paths: &mut Paths<'_>| {
            let mut path = paths.of(directory);
            path.extend_from_slice(name);
            LayerError::Entry { path, source }
        };
        let there = lower.lookup(parent, name);
        if upper.is_directory(inode) {
            let implicit = upper.is_implicit(inode);
            if let Some(there) = there {
                if lower.is_directory(there) {
                    copied.is_now(inode, there);
                    if !implicit {
                        lower
                            .copy_metadata(upper, inode, there, &mut copied)
                            .map_err(|it| failed(it, &mut paths))?;
                    }
                    continue;
                }
                if implicit {
                    let path = paths.of(inode);
                    match follow::directory(lower, &path, Missing::Stop) {
                        Ok(Place::Directory(found)) => copied.is_now(inode, found),
                        Ok(Place::Missing) => return Err(LayerError::ParentNotDirectory(path)),
                        Err(blocked) => return Err(blocked.of(&path)),
                    }
                    continue;
                }
            }
        }
        if there.is_some() {
            lower.remove(parent, name);
        }
        let here =
            lower.copy_inode(upper, inode, &mut copied).map_err(|it| failed(it, &mut paths))?;
        lower.insert(parent, name, here, Link::Equal).map_err(|it| failed(it, &mut paths))?;
    }
    Ok(())
}

/// Paths of the directories of a builder, found when one is first asked for.
struct Paths<'a> {
    tree: &'a Builder,
    /// By inode: the directory above and the name in it.
    above: Vec<Option<(InodeId, &'a [u8])>>,
}

impl<'a> Paths<'a> {
    const fn new(tree: &'a Builder) -> Self {
        Self { tree, above: Vec::new() }
    }

    /// The path with a slash at its end, and none in front.
    fn of(&mut self, mut directory: InodeId) -> Vec<u8> {
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
