# Completion of quire for fish. It asks quire for the words.
function __quire_offer
    set -l words (commandline --tokenize --cut-at-cursor --current-process)
    set -l current (commandline --current-token --cut-at-cursor)
    # The words before may be `sudo`, or variables.
    while set -q words[2]; and not string match -qr '(^|/)quire$' -- $words[1]
        set -e words[1]
    end
    for line in ($words[1] completions fish -- $words[2..-1] "$current" 2>/dev/null)
        switch $line
            case :files
                __fish_complete_path (string replace -r '^--[^=]*=' '' -- $current)
            case :directories
                __fish_complete_directories (string replace -r '^--[^=]*=' '' -- $current)
            case :programs
                complete -C (string replace -r '^--[^=]*=' '' -- $current)
            case '*'
                echo $line
        end
    end
end
complete -c quire -f -a '(__quire_offer)'
