mod library;
