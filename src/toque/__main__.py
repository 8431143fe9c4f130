from toque.cli.main import main

main()
